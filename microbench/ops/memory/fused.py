"""Fused kernels that torch.compile makes of neighbouring pointwise ops and reductions."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from types import FunctionType
from typing import cast

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Workload,
)
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import points_of

CALL = "itercast.fused"
MAX_ELEMENTS = 2**23
RESIDENT_BLOCKS: int = assumed(__file__, "resident_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One kernel of ``ops`` ops over ``numel`` elements, and the bytes it reads and writes.

    ``again_bytes``: what it reads a second time, because an output needs a whole row first, as in a
    norm, a softmax or a division by a sum. ``row_bytes``: what it reads of one row.
    """

    op: str = "fused"
    ops: int
    numel: int
    read_bytes: int
    written_bytes: int
    again_bytes: int = 0
    row_bytes: int = 0
    dtype: str = "fp32"


def _chained(rows: int, width: int, inputs: int, results: int, ops: int) -> Fused:
    """A point from sizes as the YAML file states them; each input and result takes part."""
    numel, nbytes = rows * width, rows * width * ITEMSIZE_BYTES["fp32"]
    return Fused(
        ops=max(ops, inputs, results),
        numel=numel,
        read_bytes=inputs * nbytes,
        written_bytes=results * nbytes,
    )


def _fits(p: Fused) -> bool:
    return p.numel <= MAX_ELEMENTS


def build(p: Fused, device: str) -> Workload:
    """A compiled chain, every third op a row's mean; NotImplementedError without a compiler."""
    if device == "cpu" and not shutil.which("g++"):
        raise NotImplementedError("torch.compile needs a C++ compiler on a CPU")
    size = p.numel * ITEMSIZE_BYTES[p.dtype]
    width = next(n for n in range(min(4096, p.numel), 0, -1) if p.numel % n == 0)
    shape = (p.numel // width, width)
    inputs = [
        torch.randn(shape, device=device).to(torch_dtype(p.dtype))
        for _ in range(max(1, round(p.read_bytes / size)))
    ]
    results = max(1, round(p.written_bytes / size))
    chain = _chain(p.ops, results)
    chain.__code__ = chain.__code__.replace()  # of one code torch compiles eight versions at most
    call = torch.compile(chain, dynamic=False)
    return Workload(run=lambda: call(*inputs), through_aten=False)


def _chain(ops: int, results: int) -> FunctionType:
    """A function of ``ops`` pointwise ops and means that reads all of its inputs.

    It returns its last value and, of two ``results``, that of the middle op.
    """

    def chain(*inputs: Tensor) -> tuple[Tensor | None, ...]:
        x, middle = inputs[0], None
        for number in range(ops):
            other = inputs[number % len(inputs)]
            if number % 3 == 2:  # a reduction, as in norms
                x = x - x.mean(-1, keepdim=True)
            else:
                # no assumption: keeps values finite
                x = (x * 0.9).sigmoid() + other if number % 3 else x * other
            middle = x if number == ops // 2 else middle
        return (x, middle)[:results]

    return cast(FunctionType, chain)


def flops(p: Fused) -> Numbers:
    """One per element and op."""
    return 1.0 * p.numel * p.ops


def bytes_moved(p: Fused) -> Numbers:
    """Inputs read once, results written once."""
    return 1.0 * p.read_bytes + p.written_bytes


def features(p: Fused, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, bytes per element each way, length of the chain."""
    numel = np.maximum(p.numel, 1)
    return {
        "dtype": p.dtype,
        "log_ops": np.log2(np.maximum(p.ops, 1)),
        "log_numel": np.log2(numel),
        "read_per_element": p.read_bytes / numel,
        "written_per_element": p.written_bytes / numel,
        "log_per_core": np.log2(numel / gpu.sm_count),
    }


def from_call(call: OpCall) -> Fused | None:
    """Describe a call of itercast.fused(*inputs, ops=, numel=); None if it has no elements.

    ``inputs`` are the tensors it reads, its outputs those it writes.
    """
    outputs = call.outputs or call.args
    if not outputs or not call.kwargs["numel"]:
        return None
    return Fused(
        ops=call.kwargs["ops"],
        numel=call.kwargs["numel"],
        read_bytes=sum(t.nbytes for t in call.args),
        written_bytes=sum(t.nbytes for t in call.outputs),
        again_bytes=call.kwargs.get("again_bytes", 0),
        row_bytes=call.kwargs.get("row_bytes", 0),
        dtype=max((t.dtype for t in outputs), key=ITEMSIZE_BYTES.__getitem__),
    )


def retype(p: Fused, dtype: str, gpu: Gpu) -> Fused:
    """The point in a dtype, its bytes scaled with the size of an element."""
    factor = ITEMSIZE_BYTES[dtype] / ITEMSIZE_BYTES["fp32"]
    read, written = round(p.read_bytes * factor), round(p.written_bytes * factor)
    return replace(p, read_bytes=read, written_bytes=written, dtype=dtype)


def resize(p: Fused, factor: float, first_share: float) -> Fused:
    """Grows the number of elements; bytes per element stay."""
    numel = max(1, round(p.numel * factor))
    inputs, results = p.read_bytes // p.numel, p.written_bytes // p.numel
    return replace(p, numel=numel, read_bytes=inputs * numel, written_bytes=results * numel)


def fallback(p: Fused, measured: Measured) -> list[Part]:
    """A pass over memory at the rate of a pointwise kernel.

    Rows read twice come from memory again if the last cache no longer holds them: in between, each
    SM reads RESIDENT_BLOCKS rows.
    """
    gpu = measured.gpu
    if gpu.kind == "cpu" or measured.seen("fused", p.op, p.dtype):
        return []
    bytes_until_again = min(p.read_bytes, RESIDENT_BLOCKS * gpu.sm_count * p.row_bytes)
    again = p.again_bytes if bytes_until_again > gpu.l2_bytes else 0
    return [replace(memory_copy(p.read_bytes + p.written_bytes + again), checked=True)]


FAMILY = Family(
    name="fused",
    params=Fused,
    sweep=points_of(15, facts_of(__file__), _chained, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={CALL: from_call},
    fallback=fallback,
    on_demand=True,
    gpu_sweep=GpuSweep(
        retype=retype,
        resize=resize,
    ),
    compiled=True,
)
