"""An optimizer's step on a table whose gradient holds one row per lookup (``sparse=True``).

Rows come as often as they were looked up. SGD adds them to the table one by one; Adagrad and Adam
first sort them and add equal ones up (``coalesce``), and change the rows that were touched alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.extras.lookups.embedding_bag import one_after_the_other
from itercast.extras.lookups.random_streams import (
    LINE_BYTES,
    draw_rows,
    row_bytes_from_memory,
    stream_features,
    table_features,
    unique_rows,
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
    is_any,
    itemsize_bytes,
    logs,
    repeated,
)
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import points_of, scale_axes

OPS = ("sgd", "adagrad", "adam")  # torch.optim.SGD, Adagrad, SparseAdam
COALESCED = ("adagrad", "adam")
# Passes over touched rows after they are summed: state and table read and written, values between.
PASSES = {"sgd": 0, "adagrad": 9, "adam": 20}
FLOPS = {"sgd": 0, "adagrad": 6, "adam": 14}  # per element of touched rows
SWEPT = facts_of(__file__)
MAX_ELEMENTS = 2**22  # of a gradient; one thread adds its rows
MAX_TABLE = 2**24
GPU_LIMITS = {"lookups": 2**23, "dim": 1024}
LEARNING_RATE = 1e-3
RANKS = 4096  # of rows, by how often they are looked up, that are summed one by one
COALESCE: Mapping[str, float] = assumed(__file__, "coalesce")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseUpdate:
    """One step of the optimizer ``op`` on a (rows, dim) table with a gradient of ``lookups`` rows.

    ``skew``, ``repeats``, ``unique`` and ``reuse`` are those of the index stream, see
    ``itercast.extras.lookups.random_streams``. ``tables``: so many equal tables are updated one
    after the other; all other fields, and the time, are of one table.
    """

    op: str
    rows: int
    dim: int
    lookups: int
    skew: float = 0.0
    repeats: float = 0.0
    unique: int = 0
    reuse: str = ""
    tables: int = 1
    dtype: str = "fp32"


def _fits(p: SparseUpdate) -> bool:
    return p.rows * p.dim <= MAX_TABLE and p.lookups * p.dim <= MAX_ELEMENTS


def build(p: SparseUpdate, device: str) -> Workload:
    """Tables, their optimizer's state, and gradients that are not coalesced."""
    index = draw_rows(p, device).unsqueeze(0)
    runs = [optimizer_step(p.op, *operands(p, index, device)) for _ in range(p.tables)]
    return Workload(run=one_after_the_other(runs), calls=p.tables, through_aten=False)


def operands(p: SparseUpdate, index: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """A table, and a gradient of the rows ``index`` (1, lookups) in the order of their lookups."""
    dtype = torch_dtype(p.dtype)
    table = torch.nn.Parameter(repeated(torch.randn, (p.rows, p.dim), device).to(dtype))
    values = repeated(torch.randn, (p.lookups, p.dim), device).to(dtype)
    gradient = torch.sparse_coo_tensor(index.clone(), values, table.shape, check_invariants=False)
    return table, gradient


def optimizer_step(op: str, table: Tensor, gradient: Tensor) -> Callable[[], object]:
    """The optimizer's step on this table; its state is there already."""
    if op == "sgd":  # without the loop over parameters, which costs more than a small addition
        return lambda: table.data.add_(gradient, alpha=-LEARNING_RATE)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, of which torch warns
    make = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[op]
    optimizer = make([table], lr=LEARNING_RATE)
    table.grad = gradient
    optimizer.step()
    return lambda: optimizer.step()


def flops(p: SparseUpdate) -> Values:
    """A multiplication and an addition per element of the gradient, and the optimizer's own."""
    return (2.0 * p.lookups + _by_op(FLOPS, p.op) * unique_rows(p)) * p.dim


def bytes_moved(p: SparseUpdate) -> Values:
    """Gradient rows and int64 row numbers read, and a row read and written for each.

    Adagrad and Adam also read and write the touched rows of the table, of their state and of
    temporary results.
    """
    row_bytes = p.dim * itemsize_bytes(p.dtype)
    passes = _by_op(PASSES, p.op) * unique_rows(p)
    return (3.0 * p.lookups + passes) * row_bytes + 8.0 * p.lookups


def cached_bytes(p: SparseUpdate, gpu: Gpu) -> Values:
    """``bytes_moved``, with rows to add to that the last cache holds counted as such."""
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    saved = p.lookups * row_bytes - row_bytes_from_memory(p, row_bytes, gpu.l2_bytes)
    return bytes_moved(p) - 2 * saved


def _by_op(values: Mapping[str, int], op: str) -> Values:
    return sum(value * np.equal(op, name) for name, value in values.items())


def features(p: SparseUpdate, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, how often rows are reused, and how much of the cache they fill."""
    row_bytes = 1.0 * p.dim * itemsize_bytes(p.dtype)
    return {
        "op": p.op,
        "dtype": p.dtype,
        **logs(p, "rows", "dim", "lookups"),
        "log_unique": np.log2(unique_rows(p)),
        **stream_features(p, row_bytes, gpu.l2_bytes),
        "lines_64": np.ceil(row_bytes / LINE_BYTES),
        **table_features(p, row_bytes, gpu.l2_bytes),
    }


def allocated_bytes(p: SparseUpdate) -> float:
    """Bytes of whole tables and of Adam's state, though only touched rows are read."""
    return 3.0 * p.tables * p.rows * p.dim * float(itemsize_bytes(p.dtype))


def resize(p: SparseUpdate, factor: float, first_share: float) -> SparseUpdate:
    """Lookups, then the width; touched rows grow with the lookups."""
    grown = scale_axes(p, factor, first_share, GPU_LIMITS)
    more = grown.lookups / p.lookups
    unique = min(p.rows, grown.lookups, max(1, round(p.unique * more))) if p.unique else 0
    return replace(grown, unique=unique)


def fallback(p: SparseUpdate, measured: Measured) -> list[Part]:
    """Rows added to the table one by one, and copies, where no rows of a CPU show this optimizer.

    On a GPU SGD's time depends on which rows are updated, and is priced by ``cached_bytes``.
    Optimizers that sum rows first are priced by bytes and kernels (``_coalesced``), as few were
    measured.
    """
    if measured.gpu.kind != "cpu":
        return _coalesced(p) if is_any(p.op, COALESCED) else []
    if measured.seen("sparse_update", p.op, p.dtype):
        return []
    add = IndexOp(
        op="index_add_", outer=1, size=p.lookups, inner=p.dim, source=p.rows, dtype=p.dtype
    )
    parts = [Part(family="index", params=add)]
    if is_any(p.op, COALESCED):
        touched = float(unique_rows(p)) * p.dim * float(itemsize_bytes(p.dtype))
        parts.append(memory_copy(PASSES[p.op] * touched))
    return parts


def _coalesced(p: SparseUpdate) -> list[Part]:
    """Passes over gradients and touched rows, a sort of row numbers, and small kernels.

    Equal rows are added one after the other, each column by one thread, which waits for memory as
    often as the hottest row is looked up.
    """
    nbytes = float(bytes_moved(p)) + COALESCE["sort_bytes"] * p.lookups
    kernels = COALESCE["kernels"] + COALESCE["kernels_an_equal_row"] * _hottest(p)
    return [memory_copy(nbytes), replace(memory_copy(1.0), times=kernels)]


def _hottest(p: SparseUpdate) -> float:
    """Lookups of the hottest row: all / sum of ranks ** -skew, but at least the mean of rows."""
    mean = p.lookups / max(1.0, float(unique_rows(p)))
    ranks = np.arange(1, min(p.rows, RANKS) + 1, dtype=float)
    total = float((ranks**-p.skew).sum())
    if p.rows > RANKS:  # the sum over colder rows as an integral
        power = 1 - p.skew
        beyond = np.log(p.rows / RANKS) if not power else (p.rows**power - RANKS**power) / power
        total += float(beyond)
    return max(mean, p.lookups / total)


def from_call(call: OpCall) -> SparseUpdate:
    """itercast.sparse_update(table, gradient's rows, optimizer), of a shard of a table."""
    (rows, dim), gradient, op = call.args[0].shape, call.args[1], call.args[2]
    stream = {k: v for k, v in call.kwargs.get("stream", {}).items() if k != "spread"}
    lookups, dtype = gradient.shape[0], gradient.dtype
    return SparseUpdate(op=op, rows=rows, dim=dim, dtype=dtype, **{"lookups": lookups, **stream})


FAMILY = Family(
    name="sparse_update",
    params=SparseUpdate,
    sweep=points_of(17, SWEPT, SparseUpdate, _fits, with_random_stream),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    cached_bytes=cached_bytes,
    features=features,
    answers={"itercast.sparse_update": from_call},
    fallback=fallback,
    gpu_sweep=GpuSweep(resize=resize, allocated_bytes=allocated_bytes, weight=0.5),
)
