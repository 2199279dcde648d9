"""Embedding bags of many tables in one call, by FBGEMM: lookups, and gradients with their update.

Swept where FBGEMM is installed (``pip install itercast[fbgemm]``) and the family is named. Its
backward pass updates the rows that were looked up at once: there is no gradient of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Numbers,
    Workload,
    itemsize_bytes,
    log_uniform,
    logs,
)
from itercast.microbench.ops.lookup.random_streams import (
    LINE_BYTES,
    draw_stream,
    stream_features,
    unique_rows,
    with_random_stream,
)
from itercast.microbench.slow_imports import torch

OPS = ("forward", "sgd", "rowwise_adagrad")
DIMS = (8, 16, 32, 64, 128, 256)
MAX_ELEMENTS = 2**24  # of all tables
MAX_LOOKED_UP = 2**22  # elements of rows looked up
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedBags:
    """One call on ``tables`` equal tables, each (rows, dim) with ``lookups`` of ``bags`` bags.

    ``op``: forward, or the backward pass with the update of an optimizer. The stream of each
    table is that of ``itercast.microbench.ops.lookup.random_streams``; ``spread`` of bags' lengths.
    """

    op: str
    tables: int
    rows: int
    dim: int
    bags: int
    lookups: int
    skew: float = 0.0
    repeats: float = 0.0
    unique: int = 0
    reuse: str = ""
    spread: float = 0.0
    dtype: str = "fp32"


def sweep() -> Iterator[BatchedBags]:
    """Yields points without end: 1 to 100 tables with 16M elements together."""
    rng = np.random.default_rng(19)
    while True:
        bags, pooling = log_uniform(rng, 16, 4096), log_uniform(rng, 1, 80)
        p = BatchedBags(
            op=str(rng.choice(OPS, p=[0.5, 0.25, 0.25])),
            tables=log_uniform(rng, 1, 100),
            rows=log_uniform(rng, 100, 2**20),
            dim=int(rng.choice(DIMS)),
            bags=bags,
            lookups=bags * pooling,
        )
        small = p.tables * p.rows * p.dim <= MAX_ELEMENTS
        if small and p.tables * p.lookups * p.dim <= MAX_LOOKED_UP:
            yield with_random_stream(rng, p)


def build(p: BatchedBags, device: str) -> Workload:
    """FBGEMM's module and row numbers; a backward pass repeats that of one forward pass."""
    fbgemm = _fbgemm()
    on = ("HOST", "CPU") if device == "cpu" else ("DEVICE", "CUDA")
    place = fbgemm.EmbeddingLocation[on[0]], fbgemm.ComputeDevice[on[1]]
    kind = "EXACT_ROWWISE_ADAGRAD" if p.op == "rowwise_adagrad" else "EXACT_SGD"
    bags = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(p.rows, p.dim, *place)] * p.tables,
        optimizer=fbgemm.OptimType[kind],
        learning_rate=LEARNING_RATE,
    )
    streams = [draw_stream(p, device) for _ in range(p.tables)]
    index = torch.cat([rows for rows, _ in streams])
    starts = [at + number * p.lookups for number, (_, at) in enumerate(streams)]
    offsets = torch.cat([*starts, torch.tensor([len(index)], device=device)])
    if p.op == "forward":
        return Workload(run=lambda: bags(index, offsets), through_aten=False)
    output = bags(index, offsets)
    gradient = torch.randn_like(output)
    return Workload(run=lambda: output.backward(gradient, retain_graph=True), through_aten=False)


def _fbgemm() -> Any:
    """FBGEMM's training module; NotImplementedError where it is not installed or does not load."""
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    except (ImportError, OSError) as exc:
        reason = " ".join(str(exc).split())[:80]
        raise NotImplementedError(
            f"batched_bags needs FBGEMM for this torch (pip install itercast[fbgemm]): {reason}"
        ) from None
    return fbgemm


def flops(p: BatchedBags) -> Numbers:
    """An addition per element looked up; backward a multiplication and an addition."""
    return np.where(np.equal(p.op, "forward"), 1.0, 2.0) * p.tables * p.lookups * p.dim


def bytes_moved(p: BatchedBags) -> Numbers:
    """Forward: a row read per lookup, one written per bag. Row numbers and offsets are int64.

    Backward: a bag's gradient read per lookup; touched rows read and written.
    """
    forward = np.equal(p.op, "forward")
    rows = p.lookups + np.where(forward, 1.0 * p.bags, 2.0 * unique_rows(p))
    return p.tables * (rows * p.dim * itemsize_bytes(p.dtype) + 8.0 * (p.lookups + p.bags))


def features(p: BatchedBags, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes of a table, of all of them, and how often rows are reused.

    Each table has an equal part of the cache.
    """
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    return {
        "op": p.op,
        "dtype": p.dtype,
        "spread": p.spread,
        **logs(p, "tables", "rows", "dim", "bags", "lookups"),
        "log_pooling": np.log2(p.lookups / p.bags),
        "log_all_lookups": np.log2(1.0 * p.tables * p.lookups),
        **stream_features(p, row_bytes, gpu.l2_bytes / p.tables),
        "lines_64": np.ceil(row_bytes / LINE_BYTES),
    }


def allocated_bytes(p: BatchedBags) -> float:
    """All tables, of which touched rows are read."""
    return 1.0 * p.tables * p.rows * p.dim * float(itemsize_bytes(p.dtype))


FAMILY = Family(
    name="batched_bags",
    params=BatchedBags,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
    on_demand=True,
    gpu_sweep=GpuSweep(allocated_bytes=allocated_bytes, dtypes={"fp32": 1.0}),
)
