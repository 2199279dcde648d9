"""Moving and ordering data: gather and scatter, joins, slices, padding, sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Workload,
    is_any,
    itemsize_bytes,
    log_uniform,
    logs,
    torch_dtype,
)
from itercast.microbench.ops.lookup.index_calls import ANSWERS, IndexOp
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_NUMEL, aligned, spread
from itercast.microbench.slow_imports import torch

ELEMENTWISE_INDEX = ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_")
SLICE_INDEX = ("index_select", "index", "index_add", "index_add_")
PUT: tuple[str, ...] = ("index_put", "index_put_", "index_put_accumulate", "index_put_accumulate_")
JOIN = ("cat", "stack", "split_with_sizes_copy")
PART = ("slice_backward", "select_backward", "slice_scatter", "select_scatter", "narrow_copy")
SHUFFLE = ("flip", "roll", "tril", "triu")
ORDER = ("sort", "topk")
OTHER: tuple[str, ...] = ("constant_pad_nd", "repeat", "unfold_backward")
INDEXED = ELEMENTWISE_INDEX + SLICE_INDEX + PUT
OPS = INDEXED + JOIN + PART + SHUFFLE + ORDER + OTHER
COMMON: tuple[str, ...] = (
    "cat",
    "index",
    "index_put_accumulate_",
    "index_add_",
    "index_select",
    "select_backward",
    "slice_backward",
    "gather",
)
COMMON += ("constant_pad_nd", "scatter_add", "stack", "roll", "sort", "topk", "repeat")
# results as large as ``source``: all of it is written (and read, except by a backward or a pad)
FILLS = ("slice_backward", "select_backward", "constant_pad_nd", "unfold_backward")
REWRITES: tuple[str, ...] = ("scatter", "scatter_add", "index_add", "index_put", "slice_scatter")
REWRITES += ("select_scatter", "index_put_accumulate")
ADDS = ("scatter_add", "scatter_add_", "index_add", "index_add_", *PUT[2:])
SLOW = {"sort": 2**19, "topk": 2**21, "unfold_backward": 2**21, **dict.fromkeys(PUT[2:], 2**21)}
SLOW |= dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "gather"), 2**22)
SLOW |= dict.fromkeys(("index_put", "index_put_", "index_add", "index_add_", "flip"), 2**22)
MAX_ELEMENTS = 2**23
ELEMENT_CLOCKS: float = assumed(__file__, "element_clocks")
BY_ELEMENT = ("index_select", "index_add", "index_add_")
LENGTHENED: tuple[str, ...] = ("cat", "split_with_sizes_copy", "slice_backward", "slice_scatter")
LENGTHENED += ("narrow_copy", "constant_pad_nd", "flip", "roll")
WIDENED = ("stack", "select_backward", "select_scatter")


def _draw(rng: np.random.Generator) -> IndexOp:
    op = str(rng.choice(COMMON if rng.random() < 0.5 else OPS))
    outer = 1 if rng.random() < 0.4 else log_uniform(rng, 1, 4096)
    inner = 1 if rng.random() < 0.3 else log_uniform(rng, 1, 4096)
    size, source, tensors, k = log_uniform(rng, 1, 65536), 1, 1, 1
    if op in INDEXED:
        outer = 1 if op in PUT or rng.random() < 0.7 else outer
        source = log_uniform(rng, 2, 65536)
        inner = inner if op not in ELEMENTWISE_INDEX or rng.random() < 0.5 else 1
    elif op in JOIN:
        tensors = log_uniform(rng, 2, 64) if rng.random() < 0.5 else 2
        size = tensors if op == "stack" else max(size, tensors)
        source = size
    elif op in PART:
        size = 1 if op.startswith("select") else size
        source = size + log_uniform(rng, 1, 4 * size + 16)
    elif op == "constant_pad_nd":
        source = size + int(rng.choice([1, 2, 6, size]))
    elif op in SHUFFLE + ORDER:
        size = source = max(2, size)
        inner = inner if op in SHUFFLE or rng.random() < 0.2 else 1
        k = log_uniform(rng, 1, min(size, 256)) if op == "topk" else 1
    elif op == "repeat":
        size = log_uniform(rng, 2, 64)
    else:  # windows of k, half of them overlapping
        k, inner = log_uniform(rng, 2, 64), 1
        step = max(1, k // int(rng.choice([1, 2])))
        size = max(2, size)
        source = (size - 1) * step + k
    facts = {"size": size, "inner": inner, "source": source, "tensors": tensors, "k": k}
    whole_numbers = op not in ADDS and rng.random() < 0.1
    return IndexOp(op=op, outer=outer, dtype="int64" if whole_numbers else "fp32", **facts)


def sweep() -> Iterator[IndexOp]:
    """Yields points without end.

    A few elements to 8M on the larger side, fewer where a CPU is slow.
    """
    rng = np.random.default_rng(13)
    while True:
        p = _draw(rng)
        if max(moved(p), whole(p)) <= SLOW.get(p.op, MAX_ELEMENTS):
            yield p


def build(p: IndexOp, device: str) -> Workload:
    """Random tensors and valid indices; values to add are so small that sums never overflow."""
    if p.op in INDEXED:
        return Workload(run=_indexed(p, device))
    return Workload(run=_copying(p, device))


def _random(p: IndexOp, device: str, *shape: int) -> Tensor:
    if p.dtype == "int64":
        return torch.randint(0, 2**30, shape, device=device)
    return torch.rand(shape, device=device).to(torch_dtype(p.dtype))


def _shape(p: IndexOp, length: int) -> list[int]:
    """Shape of the indexed tensor, [outer, length, inner], without axes of one element.

    Kernels are slower on such axes: index_add takes three times as long on (1, n, m) as on (n, m).
    """
    triangle = p.op in ("tril", "triu")  # of the last two axes
    outer = [p.outer] if p.outer > 1 or triangle else []
    return [*outer, length, *([p.inner] if p.inner > 1 or triangle else [])]


def _axis(p: IndexOp) -> int:
    return int(p.outer > 1)


def _indexed(p: IndexOp, device: str) -> Callable[[], object]:
    call, axis = getattr(torch.ops.aten, p.op.replace("_accumulate", "")), _axis(p)
    x = _random(p, device, *_shape(p, p.source))
    if p.op in ELEMENTWISE_INDEX:
        index = torch.randint(0, p.source, _shape(p, p.size), device=device)
        if p.op == "gather":
            return lambda: call(x, axis, index)
        added = _random(p, device, *index.shape)
        return lambda: call(x, axis, index, added)
    index = torch.randint(0, p.source, (p.size,), device=device)
    if p.op == "index_select":
        return lambda: call(x, axis, index)
    if p.op == "index":
        return lambda: call(x, [*[None] * axis, index])
    values = _random(p, device, *_shape(p, p.size))
    if p.op.startswith("index_add"):
        return lambda: call(x, axis, index, values)
    return lambda: call(x, [index], values, "accumulate" in p.op)  # PUT: outer is 1


def _copying(p: IndexOp, device: str) -> Callable[[], object]:
    call, axis = getattr(torch.ops.aten, p.op), _axis(p)
    if p.op in JOIN:
        sizes = [p.size // p.tensors] * p.tensors
        sizes[0] += p.size - sum(sizes)
        if p.op == "split_with_sizes_copy":
            whole_tensor = _random(p, device, *_shape(p, p.size))
            return lambda: call(whole_tensor, sizes, axis)
        parts = [_random(p, device, *_shape(p, n)) for n in sizes]
        if p.op == "stack":
            parts = [part.select(axis, 0) for part in parts]
        return lambda: call(parts, axis)
    part = _random(p, device, *_shape(p, p.size))
    if p.op in PART:
        return _part(p, part, device)
    if p.op == "unfold_backward":
        step = (p.source - p.k) // max(1, p.size - 1)
        grad = _random(p, device, *_shape(p, p.size), p.k)
        return lambda: call(grad, _shape(p, p.source), axis, p.k, step)
    if p.op == "repeat":
        short = part.narrow(axis, 0, 1).contiguous()
        times = [p.size if at == axis else 1 for at in range(part.dim())]
        return lambda: call(short, times)
    after = [0, 0] * (part.dim() - 1 - axis)
    arguments: dict[str, tuple[object, ...]] = {
        "constant_pad_nd": ([*after, 0, p.source - p.size], 0.0),
        "flip": ([axis],),
        "roll": ([max(1, p.size // 2)], [axis]),
        "sort": (axis,),
        "topk": (p.k, axis),
    }
    extra = arguments.get(p.op, ())
    return lambda: call(part, *extra)


def _part(p: IndexOp, part: Tensor, device: str) -> Callable[[], object]:
    call, axis, full = getattr(torch.ops.aten, p.op), _axis(p), _shape(p, p.source)
    if p.op == "slice_backward":
        return lambda: call(part, full, axis, 0, p.size, 1)
    if p.op == "select_backward":
        return lambda: call(part.select(axis, 0), full, axis, p.source // 2)
    x = _random(p, device, *full)
    if p.op == "slice_scatter":
        return lambda: call(x, part, axis, 0, p.size)
    if p.op == "select_scatter":
        return lambda: call(x, part.select(axis, 0), axis, p.source // 2)
    return lambda: call(x, axis, 0, p.size)


def moved(p: IndexOp) -> Numbers:
    """Number of elements picked or placed; an unfolded window holds k."""
    return 1.0 * p.outer * p.size * p.inner * np.where(is_any(p.op, ("unfold_backward",)), p.k, 1)


def whole(p: IndexOp) -> Numbers:
    """Number of elements of the tensor that is indexed: outer * source * inner."""
    return 1.0 * p.outer * p.source * p.inner


def flops(p: IndexOp) -> Numbers:
    """An addition per element added, log2(size) comparisons per element sorted, else none.

    topk: one comparison per element, and a sort of the k winners.
    """
    n = moved(p)
    found = np.where(is_any(p.op, (*ADDS, "unfold_backward")), n, 0.0)
    found = np.where(is_any(p.op, ("sort",)), n * np.log2(np.maximum(p.size, 2)), found)
    winners = 1.0 * p.outer * p.inner * p.k
    return np.where(is_any(p.op, ("topk",)), n + winners * np.log2(np.maximum(p.k, 2)), found)


def bytes_moved(p: IndexOp) -> Numbers:
    """Moved elements read and written once, an int64 index per element or slice.

    Where the result is as large as the source, that is written whole, and read unless it is only
    filled; a value added to is read first; sort and topk write int64 positions; repeat reads once.
    """
    item, n, full = itemsize_bytes(p.dtype), moved(p), whole(p)
    index = np.where(
        is_any(p.op, ELEMENTWISE_INDEX), n, np.where(is_any(p.op, SLICE_INDEX + PUT), p.size, 0.0)
    )
    written = np.where(is_any(p.op, FILLS), full, n + np.where(is_any(p.op, ADDS), n, 0.0))
    written = written + np.where(is_any(p.op, REWRITES), 2.0 * full, 0.0)
    chosen = 1.0 * p.outer * p.inner * np.where(is_any(p.op, ("topk",)), p.k, p.size)
    written = np.where(is_any(p.op, ORDER), chosen, written)
    index = np.where(is_any(p.op, ORDER), chosen, index)
    read = np.where(is_any(p.op, ("repeat",)), 1.0 * p.outer * p.inner, n)
    return (read + written) * item + 8.0 * index


def features(p: IndexOp, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, how full the indexed side is, and the length of the run that one index moves."""
    n, item = moved(p), itemsize_bytes(p.dtype)
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_moved": np.log2(n),
        **logs(p, "outer", "size", "inner", "source"),
        "log_run_bytes": np.log2(1.0 * p.inner * item),
        "log_fill": np.log2(1.0 * p.size / p.source),
        "log_k": np.log2(p.k),
        "log_tensors": np.log2(p.tensors),
        "log_each": np.log2(n / p.tensors),
        "log_source_per_cache": np.log2(whole(p) * item / gpu.l2_bytes),
        "log_per_core": np.log2(n / gpu.sm_count),
    }


def resize(p: IndexOp, factor: float, lean: float) -> IndexOp:
    """Grows the leading axes where there are any; else indices, the joined or cut axis, or rows."""
    if p.outer > 1:
        return spread(p, factor, 1.0, {"outer": MAX_NUMEL})
    if p.op in INDEXED:
        runs = 16384 if p.inner > 1 else 1
        return spread(p, factor, 0.5 + lean / 2, {"size": 2**23, "inner": runs})
    if p.op in LENGTHENED:
        size = max(p.tensors, aligned(p.size * factor, p.size))
        more = p.source - p.size
        more = more if p.op == "constant_pad_nd" else round(more * size / p.size)
        return replace(p, size=size, source=size + more)
    return spread(p, factor, 1.0, {"inner" if p.op in WIDENED else "outer": MAX_NUMEL})


def allocated_bytes(p: IndexOp) -> float:
    """The larger side of the indexed axis, of which some slots are read."""
    return 1.0 * p.outer * max(p.size, p.source) * p.inner * float(itemsize_bytes(p.dtype))


def fallback(p: IndexOp, measured: Measured) -> list[Part]:
    """Prices an op that no model has seen on a GPU as a copy of the bytes that it moves.

    Kernels of BY_ELEMENT find the place of each element anew: they take ELEMENT_CLOCKS of an SM for
    it, if not their bytes take longer.
    """
    gpu = measured.gpu
    if gpu.kind == "cpu" or measured.seen("index", p.op, p.dtype):
        return []
    clocks = ELEMENT_CLOCKS * float(moved(p)) if p.op in BY_ELEMENT else 0.0
    meanwhile = clocks / (gpu.sm_count * gpu.clock_hz) * gpu.hbm_bytes_per_s  # bytes of a copy
    return [memory_copy(max(float(bytes_moved(p)), meanwhile))]


FAMILY = Family(
    name="index",
    params=IndexOp,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers=ANSWERS,
    fallback=fallback,
    weight=1.5,
    gpu_sweep=GpuSweep(
        resize=resize,
        allocated_bytes=allocated_bytes,
        weight=0.5,
    ),
)
