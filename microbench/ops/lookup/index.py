"""Moving and ordering data: gather and scatter, joins, slices, padding, sorting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.calls import call_of
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
)
from itercast.microbench.ops.lookup.index_calls import ANSWERS, IndexOp
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_NUMEL, aligned, points_of, scale_axes

FACTS = facts_of(__file__)
GROUPS = {name: tuple[str, ...](ops.split()) for name, ops in FACTS["groups"].items()}
INDEXED = GROUPS["by_element"] + GROUPS["by_slot"] + GROUPS["put"]
MAX_ELEMENTS = 2**23
SLOW = {op: 2**most for most, ops in FACTS["slow"].items() for op in ops.split()}


def _some_of_whole_numbers(rng: np.random.Generator, p: IndexOp) -> IndexOp:
    whole_numbers = p.op not in GROUPS["adds"] + GROUPS["masked"] and rng.random() < 0.1
    return replace(p, dtype="int64") if whole_numbers else p


def _point(op: str, size: int, more: int = -1, overlap: int = 0, **fields: Any) -> IndexOp:
    """A point from sizes as the YAML file states them.

    ``more``: slots of the source beside the ``size`` moved ones. ``overlap``: for windows, how many
    of them an element is in.
    """
    if more >= 0:
        fields["source"] = size + more
    if op == "stack":
        fields["tensors"] = size
    if op in GROUPS["join"]:
        fields["source"] = size
    if overlap:  # of windows
        fields["source"] = (size - 1) * max(1, fields["k"] // overlap) + fields["k"]
    return IndexOp(op=op, size=size, **fields)


def _fits(p: IndexOp) -> bool:
    small = max(moved(p), whole(p)) <= SLOW.get(p.op, MAX_ELEMENTS)
    return bool(small and (p.op != "topk" or p.k <= p.size))


def build(p: IndexOp, device: str) -> Workload:
    """Random tensors and valid indices; values to add are so small that sums never overflow."""
    axis, whole, part = int(p.outer > 1), _shape(p, p.source), _shape(p, p.size)
    sizes = [p.size // p.tensors] * p.tensors
    sizes[0] += p.size - sum(sizes)

    def values(*shape: int) -> Tensor:
        if p.dtype == "int64":
            return torch.randint(0, 2**30, shape, device=device)
        return torch.rand(shape, device=device).to(torch_dtype(p.dtype))

    def positions(*shape: int) -> Tensor:
        return torch.randint(0, p.source, shape, device=device)

    operands = {
        **{"axis": axis, "whole": whole, "size": p.size, "sizes": sizes, "k": p.k},
        **{"half": max(1, p.size // 2), "middle": p.source // 2},
        "step": (p.source - p.k) // max(1, p.size - 1),
        "pad": [0, 0] * (len(part) - 1 - axis) + [0, p.source - p.size],
        "times": [p.size if i == axis else 1 for i in range(len(part))],
        "source": lambda: values(*whole),
        "part": lambda: values(*part),
        "slot": lambda: values(*part).select(axis, 0),
        "short": lambda: values(*_shape(p, 1)),
        "windows": lambda: values(*part, p.k),
        "parts": lambda: [values(*_shape(p, n)) for n in sizes],
        "slots": lambda: [values(*_shape(p, n)).select(axis, 0) for n in sizes],
        "each": lambda: positions(*part),
        "positions": lambda: positions(p.size),
        "mask": lambda: torch.randperm(p.source, device=device) < p.size,
        "indices": lambda: [None] * axis + [positions(p.size)],
    }
    return Workload(run=call_of(p.op.replace("_accumulate", ""), FACTS["calls"][p.op], operands))


def _shape(p: IndexOp, length: int) -> list[int]:
    """Shape of the indexed tensor, [outer, length, inner], without axes of one element.

    Kernels are slower on such axes: index_add takes three times as long on (1, n, m) as on (n, m).
    """
    triangle = p.op in ("tril", "triu")  # of the last two axes
    outer = [p.outer] if p.outer > 1 or triangle else []
    return [*outer, length, *([p.inner] if p.inner > 1 or triangle else [])]


def _is(p: IndexOp, *groups: str) -> Values:
    """Whether the op is in one of these groups of the YAML file."""
    return is_any(p.op, [op for group in groups for op in GROUPS[group]])


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
    count = np.where(_is(p, "adds") | is_any(p.op, ("unfold_backward",)), n, 0.0)
    count = np.where(is_any(p.op, ("sort",)), n * np.log2(np.maximum(p.size, 2)), count)
    winners = 1.0 * p.outer * p.inner * p.k
    return np.where(is_any(p.op, ("topk",)), n + winners * np.log2(np.maximum(p.k, 2)), count)


def bytes_moved(p: IndexOp) -> Numbers:
    """Moved elements read and written once, an int64 index per element or slice.

    Where the result is as large as the source, that is written whole, and read unless it is only
    filled; a value added to is read first; sort and topk write int64 positions; repeat reads once.
    nonzero reads the mask twice, first to count, and writes an int64 position where it is true.
    """
    itemsize, count, whole_count = itemsize_bytes(p.dtype), moved(p), whole(p)
    by_slot = np.where(_is(p, "by_slot", "put", "masked"), p.size, 0.0)
    index = np.where(_is(p, "by_element"), count, by_slot)
    written = np.where(_is(p, "fills"), whole_count, count + np.where(_is(p, "adds"), count, 0.0))
    written = written + np.where(_is(p, "rewrites"), 2.0 * whole_count, 0.0)
    ordered = 1.0 * p.outer * p.inner * np.where(is_any(p.op, ("topk",)), p.k, p.size)
    written, index = (np.where(_is(p, "order"), ordered, other) for other in (written, index))
    read = np.where(is_any(p.op, ("repeat",)), 1.0 * p.outer * p.inner, count)
    masked = _is(p, "masked")
    read, written = np.where(masked, 2.0 * whole_count, read), np.where(masked, 0.0, written)
    return (read + written) * itemsize + 8.0 * index


def features(p: IndexOp, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, bytes of the run that one index moves, and elements moved per element (fill)."""
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


def resize(p: IndexOp, factor: float, first_share: float) -> IndexOp:
    """Grows the leading axes if there are any; else indices, the joined or cut axis, or rows."""
    if p.outer > 1:
        return scale_axes(p, factor, 1.0, {"outer": MAX_NUMEL})
    if p.op in INDEXED:
        runs = 16384 if p.inner > 1 else 1
        return scale_axes(p, factor, 0.5 + first_share / 2, {"size": 2**23, "inner": runs})
    if p.op in GROUPS["lengthened"]:
        size = max(p.tensors, aligned(p.size * factor, p.size))
        more = p.source - p.size
        more = more if p.op == "constant_pad_nd" else round(more * size / p.size)
        return replace(p, size=size, source=size + more)
    return scale_axes(
        p, factor, 1.0, {"inner" if p.op in GROUPS["widened"] else "outer": MAX_NUMEL}
    )


def allocated_bytes(p: IndexOp) -> float:
    """Bytes of the larger side of the indexed axis, though only some slots are read."""
    return 1.0 * p.outer * max(p.size, p.source) * p.inner * float(itemsize_bytes(p.dtype))


def fallback(p: IndexOp, measured: Measured) -> list[Part]:
    """Prices an op that no model has seen on a GPU as a copy of the bytes that it moves."""
    if measured.gpu.kind == "cpu" or measured.seen("index", p.op, p.dtype):
        return []
    return [memory_copy(float(bytes_moved(p)))]


FAMILY = Family(
    name="index",
    params=IndexOp,
    sweep=points_of(13, FACTS["sweep"], _point, _fits, _some_of_whole_numbers),
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
