"""Embedding bag: rows of a table, summed bag by bag, and the gradient of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.extras.lookups.random_streams import (
    LINE_BYTES,
    draw_stream,
    row_bytes_from_memory,
    stream_features,
    table_features,
    with_random_stream,
)
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Values,
    Workload,
    itemsize_bytes,
    logs,
    repeated,
)
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.sizes import aligned, points_of, swept

MODES = ("sum", "mean", "max")  # as numbered by aten
OPS = ("forward", "backward", "sparse_backward")
SWEPT = facts_of(__file__)
MAX_ELEMENTS = 2**24
GPU_DTYPES = {"fp32": 0.88, "bf16": 0.1, "fp16": 0.02}  # no assumption: shares of a sweep
GPU_BAGS = (512, 8192)
GPU_POOLING = 128  # look-ups of a bag at most
GPU_ROWS = 20_000_000  # of a table at most
ONE_SORT = 2304  # no assumption: at most so many are sorted by one kernel, as counted on an H100


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBag:
    """One call that sums ``lookups`` rows of a (rows, dim) table into ``bags``, or its backward.

    ``op``: forward; backward with a dense gradient of the table; or sparse_backward, whose gradient
    holds a row per lookup. ``skew``, ``repeats``, ``unique`` and ``reuse``: the index stream
    (``itercast.extras.lookups.random_streams``). ``spread``: standard deviation of the bags'
    lengths over their mean. ``weighted``: rows are multiplied by a weight per lookup. ``tables``:
    as many equal tables are looked up one after the other, as in recommenders; all else, time
    included, is that of one call.
    """

    op: str
    rows: int
    dim: int
    bags: int
    lookups: int
    skew: float = 0.0
    repeats: float = 0.0
    unique: int = 0
    reuse: str = ""
    spread: float = 0.0
    weighted: bool = False
    tables: int = 1
    mode: str = "sum"
    dtype: str = "fp32"


def _fits(p: EmbeddingBag) -> bool:
    gathered = p.lookups * p.dim * (4 if p.op == "backward" else 1)  # one thread adds gradients
    small = p.lookups <= 2**19 and max(p.rows * p.dim, gathered) <= MAX_ELEMENTS
    return small and (p.op, p.mode) != ("sparse_backward", "max")  # there is none


def bags_of(bags: int, pooling: int, **fields: Any) -> EmbeddingBag:
    """A point from sizes as YAML files state them; ``pooling``: look-ups of a bag."""
    return EmbeddingBag(bags=bags, lookups=bags * pooling, **fields)


def _with_random_bags(rng: np.random.Generator, p: EmbeddingBag) -> EmbeddingBag:
    """The point with a random index stream; half of them with bags of unequal lengths."""
    spread = round(float(rng.uniform(0.2, 1.5)), 2) if rng.random() < 0.5 else 0.0
    weighted = p.mode == "sum" and bool(rng.random() < 0.2)
    p = replace(p, spread=spread if p.lookups > p.bags else 0.0, weighted=weighted)
    bagged: EmbeddingBag = with_random_stream(rng, p)
    return bagged


def build(p: EmbeddingBag, device: str) -> Workload:
    """Tensors of the point's index stream; the backward gets what its forward returned.

    Each of several tables has its own memory; their streams are alike.
    """
    index, starts = draw_stream(p, device)
    runs = [_one_table(p, index.clone(), starts.clone(), device) for _ in range(p.tables)]
    return Workload(run=one_after_the_other(runs), calls=p.tables)


def one_after_the_other(runs: list[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls all of ``runs``."""
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for one in runs:
            one()

    return run


def _one_table(p: EmbeddingBag, index: Tensor, starts: Tensor, device: str) -> Callable[[], object]:
    """The call on one table, with row numbers (lookups,) and starts of bags (bags,)."""
    aten, mode = torch.ops.aten, MODES.index(p.mode)
    table = repeated(torch.randn, (p.rows, p.dim), device).to(torch_dtype(p.dtype))
    weight = torch.rand(p.lookups, device=device).to(table.dtype) if p.weighted else None
    given = (table, index, starts, False, mode, False, weight)
    if p.op == "forward":
        return lambda: aten._embedding_bag(*given)
    _, bag_of, sizes, extremes = aten._embedding_bag(*given)
    grad = torch.randn(p.bags, p.dim, device=device).to(torch_dtype(p.dtype))
    sparse = p.op == "sparse_backward"
    rest = (index, starts, bag_of, sizes, extremes, p.rows, False, mode, sparse, weight)
    return lambda: aten._embedding_bag_backward(grad, *rest)


def flops(p: EmbeddingBag) -> Values:
    """An addition (or comparison) per element of every row looked up, both ways.

    Where lookups have weights, a multiplication besides. A sparse gradient adds nothing.
    """
    adds = 1.0 - np.equal(p.op, "sparse_backward")
    return (adds + np.asarray(p.weighted)) * p.lookups * p.dim


def bytes_moved(p: EmbeddingBag) -> Numbers:
    """Forward: a row read per lookup, a row written per bag. Index and offset are int64.

    Backward: bags read, the whole gradient zeroed, a row read and written per lookup. Sparse
    backward: bags read, a row written per lookup.
    """
    backward = np.equal(p.op, "backward")
    rows = p.bags + np.where(backward, 2.0 * p.lookups + p.rows, 1.0 * p.lookups)
    itemsize = itemsize_bytes(p.dtype)
    weights = np.asarray(p.weighted) * 1.0 * p.lookups * itemsize
    return rows * p.dim * itemsize + 8.0 * (p.lookups + p.bags) + weights


def cached_bytes(p: EmbeddingBag, gpu: Gpu) -> Values:
    """``bytes_moved``, with rows of the table that the last cache holds counted as such.

    Forward reads the row of each lookup, backward reads and writes it; a sparse gradient does not
    touch the table.
    """
    passes = np.where(np.equal(p.op, "forward"), 1.0, 2.0 * np.equal(p.op, "backward"))
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    saved = p.lookups * row_bytes - row_bytes_from_memory(p, row_bytes, gpu.l2_bytes)
    return bytes_moved(p) - passes * saved


def features(p: EmbeddingBag, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, pooling, how often rows are reused, and the lookups that hit the last cache."""
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    lines = np.ceil(row_bytes / LINE_BYTES)
    return {
        "op": p.op,
        "mode": p.mode,
        "dtype": p.dtype,
        "weighted": np.asarray(p.weighted, dtype=float),
        "spread": p.spread,
        **logs(p, "rows", "dim", "bags", "lookups"),
        "log_pooling": np.log2(p.lookups / p.bags),
        **stream_features(p, row_bytes, gpu.l2_bytes),
        "lines_64": lines,
        "line_fill_128": row_bytes / 128 / np.ceil(row_bytes / 128),
        "log_bags_per_core": np.log2(p.bags / gpu.sm_count),
        **table_features(p, row_bytes, gpu.l2_bytes),
    }


def call_name(p: EmbeddingBag) -> Values:
    """Its op; gradients differ by kernels launched: usually 31, few lookups 12, maxima 2."""
    few = np.where(np.asarray(p.lookups) <= ONE_SORT, "backward, few", p.op)
    gradient = np.where(np.equal(p.mode, "max"), "backward, max", few)
    return np.where(np.equal(p.op, "backward"), gradient, p.op)


def from_forward(call: OpCall) -> EmbeddingBag | None:
    """_embedding_bag(table, index, offsets, scale_by_freq, mode, sparse, weights, last_offset)."""
    table, index, starts = call.args[:3]
    mode = call.argument(4, "mode", 0)
    bags = starts.numel - int(call.argument(7, "include_last_offset", False))
    weighted = call.argument(6, "per_sample_weights", None) is not None
    return _bag(call, table.shape, bags, index.numel, mode, weighted)


def from_backward(call: OpCall) -> EmbeddingBag | None:
    """Describe a backward of embedding bags; None where it makes a sparse gradient.

    _embedding_bag_backward(grad, index, offsets, bag_of, sizes, max, rows, _, mode, sparse, w); the
    dense one has no ``offsets`` and no ``sparse``.
    """
    dense = call.op.endswith("dense_backward.default")
    if not dense and call.argument(9, "sparse", False):
        return None
    shift = 0 if dense else 1  # of the arguments behind ``offsets``
    grad, index, rows, mode = (call.args[i] for i in (0, 1, 5 + shift, 7 + shift))
    weighted = call.argument(8 if dense else 10, "per_sample_weights", None) is not None
    return _bag(call, (rows, grad.shape[-1]), grad.shape[0], index.numel, mode, weighted)


def from_sparse_backward(call: OpCall) -> EmbeddingBag | None:
    """itercast.sparse_backward(grad, index, rows, mode, weighted), of a shard of a table."""
    grad, index, rows, mode, weighted = call.args
    found = _bag(call, (rows, grad.shape[-1]), grad.shape[0], index.numel, mode, weighted)
    return replace(found, op="sparse_backward") if found else None


def _bag(
    call: OpCall, table: tuple[int, ...], bags: int, lookups: int, mode: int, weighted: bool
) -> EmbeddingBag | None:
    """The point of a call on a (rows, dim) ``table``; None where there is nothing to look up.

    What is known of its index stream stands in ``call.kwargs["stream"]``.
    """
    if min(*table, bags, lookups) < 1:
        return None
    return EmbeddingBag(
        op="backward" if "backward" in call.op else "forward",
        rows=table[0],
        dim=table[1],
        bags=bags,
        mode=MODES[mode],
        dtype=call.args[0].dtype,
        weighted=weighted,
        **{"lookups": lookups, **call.kwargs.get("stream", {})},
    )


def resize(p: EmbeddingBag, factor: float, first_share: float) -> EmbeddingBag:
    """Grow the work of a point by ``factor``: factor**first_share times the bags.

    Look-ups a bag take the rest, then the width; each has limits. With a dense gradient of the
    table its rows grow, too.
    """
    pooling = max(1, round(p.lookups / p.bags))
    fewest, most = GPU_BAGS
    bags = min(max(most, p.bags), max(min(fewest, p.bags), round(p.bags * factor**first_share)))
    rest = factor * p.bags / bags
    new_pooling = min(max(GPU_POOLING, pooling), max(1, round(pooling * rest)))
    rest *= pooling / new_pooling
    dim = min(256, max(min(16, p.dim), aligned(p.dim * rest, p.dim)))
    rows = p.rows
    if p.op == "backward":
        rows = min(GPU_ROWS, max(min(1000, p.rows), round(p.rows * factor)))
    lookups = bags * new_pooling
    unique = min(rows, lookups, max(1, round(p.unique * lookups / p.lookups))) if p.unique else 0
    return replace(p, bags=bags, lookups=lookups, dim=dim, rows=rows, unique=unique)


def allocated_bytes(p: EmbeddingBag) -> float:
    """Bytes of whole tables, though only the rows looked up are read."""
    return 1.0 * p.tables * p.rows * p.dim * float(itemsize_bytes(p.dtype))


def fallback(p: EmbeddingBag, measured: Measured) -> list[Part]:
    """A sparse gradient as the lookup of a bag's gradient per row, where no rows show it."""
    if p.op != "sparse_backward" or measured.seen("embedding_bag", p.op, p.dtype):
        return []
    gather = IndexOp(
        op="index_select", outer=1, size=p.lookups, inner=p.dim, source=p.bags, dtype=p.dtype
    )
    return [Part(family="index", params=gather)]


FAMILY = Family(
    name="embedding_bag",
    params=EmbeddingBag,
    sweep=points_of(11, SWEPT["cpu"], bags_of, _fits, _with_random_bags),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    cached_bytes=cached_bytes,
    features=features,
    answers={
        "aten._embedding_bag.default": from_forward,
        "aten._embedding_bag_forward_only.default": from_forward,
        "aten._embedding_bag_backward.default": from_backward,
        "aten._embedding_bag_dense_backward.default": from_backward,
        "itercast.sparse_backward": from_sparse_backward,
    },
    call_name=call_name,
    fallback=fallback,
    gpu_sweep=GpuSweep(
        points=partial(swept, stated=SWEPT["gpu"], make=bags_of, finish=_with_random_bags),
        dtypes=GPU_DTYPES,
        resize=resize,
        allocated_bytes=allocated_bytes,
        weight=2.0,
    ),
)
