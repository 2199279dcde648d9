"""Embedding look-up and its dense gradient: rows of a table by index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Values,
    Workload,
    itemsize_bytes,
    logs,
)
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.traffic import computed_us, is_generated, moved_us
from itercast.microbench.ops.sizes import points_of, resize_along

CLOCKS: float = assumed(__file__, "clocks")
FEW: Mapping[str, float] = assumed(__file__, "few")
MAX_ELEMENTS = 2**25
SWEPT = facts_of(__file__)["sweep"]
UNSORTED = 3072  # no assumption: gradients of at most so many look-ups are added without a sort


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """``lookups`` uniformly random rows of a (rows, dim) table."""

    op: str
    rows: int
    dim: int
    lookups: int
    dtype: str = "fp32"


def _fits(p: Embedding) -> bool:
    return max(p.rows, p.lookups) * p.dim <= MAX_ELEMENTS


def build(p: Embedding, device: str) -> Workload:
    """A random table and random valid indices."""
    aten = torch.ops.aten
    index = torch.randint(0, p.rows, (p.lookups,), device=device)
    if p.op == "forward":
        table = torch.randn(p.rows, p.dim, device=device).to(torch_dtype(p.dtype))
        return Workload(run=lambda: aten.embedding(table, index))
    grad = torch.randn(p.lookups, p.dim, device=device).to(torch_dtype(p.dtype))
    return Workload(run=lambda: aten.embedding_dense_backward(grad, index, p.rows, -1, False))


def flops(p: Embedding) -> Numbers:
    """One addition per gradient element; a lookup has none."""
    return np.where(np.equal(p.op, "backward"), 1.0, 0.0) * p.lookups * p.dim


def bytes_moved(p: Embedding) -> Numbers:
    """A lookup reads and writes its rows; the gradient also zeroes the whole table."""
    table = np.where(np.equal(p.op, "backward"), 1.0, 0.0) * p.rows
    return (2.0 * p.lookups + table) * p.dim * itemsize_bytes(p.dtype) + 8.0 * p.lookups


def gpu_memory_us(p: Embedding, gpu: Gpu, cold: Values, stack: Values) -> Numbers:
    """Time in us of the bytes moved, or of eager torch's look-up kernel if that takes longer.

    A kernel of its own looks FEW rows up one after the other.
    """
    bytes_us = moved_us(bytes_moved(p), gpu, cold)
    eager_us = computed_us(1.0 * p.lookups * p.dim, CLOCKS, gpu)
    eager_us = np.where(p.lookups <= FEW["lookups"], p.lookups * FEW["us"], eager_us)
    eager = np.equal(p.op, "forward") & ~np.asarray(is_generated(stack))
    return np.where(eager, np.maximum(bytes_us, eager_us), bytes_us)


def features(p: Embedding, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, and look-ups per row."""
    return {
        "op": p.op,
        "dtype": p.dtype,
        **logs(p, "rows", "dim", "lookups"),
        "log_reuse": np.log2(p.lookups / p.rows),
    }


def call_name(p: Embedding) -> Values:
    """The op's name; few look-ups' gradients are added without a sort, by 2 kernels, not 31."""
    few = np.equal(p.op, "backward") & (np.asarray(p.lookups) <= UNSORTED)
    return np.where(few, "backward, unsorted", p.op)


def from_forward(call: OpCall) -> Embedding:
    """embedding(table, index, ...)."""
    table, index = call.args[:2]
    rows, dim = table.shape
    return Embedding(op="forward", rows=rows, dim=dim, lookups=index.numel, dtype=table.dtype)


def from_backward(call: OpCall) -> Embedding:
    """embedding_dense_backward(grad, index, rows, ...)."""
    grad, index, rows = call.args[:3]
    dim = grad.shape[-1]
    return Embedding(op="backward", rows=rows, dim=dim, lookups=index.numel, dtype=grad.dtype)


def allocated_bytes(p: Embedding) -> float:
    """Bytes of the whole table, though only the rows looked up are read."""
    return 1.0 * p.rows * p.dim * float(itemsize_bytes(p.dtype))


def fallback(p: Embedding, measured: Measured) -> list[Part]:
    """A copy of the bytes that it moves, where no rows show this direction in its dtype."""
    if measured.gpu.kind == "cpu" or measured.seen("embedding", p.op, p.dtype):
        return []
    return [memory_copy(float(bytes_moved(p)))]


FAMILY = Family(
    name="embedding",
    params=Embedding,
    sweep=points_of(7, SWEPT, Embedding, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    gpu_memory_us=gpu_memory_us,
    features=features,
    answers={
        "aten.embedding.default": from_forward,
        "aten.embedding_dense_backward.default": from_backward,
    },
    call_name=call_name,
    fallback=fallback,
    gpu_sweep=GpuSweep(
        resize=resize_along({"lookups": 2**20, "dim": 8192, "rows": 2**18}),
        allocated_bytes=allocated_bytes,
        weight=0.5,
    ),
)
