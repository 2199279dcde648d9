"""Elementwise ops: unary, binary, activations and their backwards, casts, copies, fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import isqrt, prod
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import OpCall, TensorSpec, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.calls import call_of
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Numbers,
    Part,
    Tensor,
    Values,
    Workload,
    is_any,
    itemsize_bytes,
    log_uniform,
    repeated,
)
from itercast.microbench.ops.memory import elementwise_names as known
from itercast.microbench.ops.memory.traffic import moved_us
from itercast.microbench.ops.sizes import MAX_NUMEL, MAX_SIDE, aligned

# no assumption: shares of a sweep
FORMS = {"same": 0.5, "scalar": 0.14, "row": 0.12, "col": 0.08, "strided": 0.08, "transposed": 0.08}
KINDS = [(op, 1) for op in known.UNARY] + [(op, 2) for op in known.BINARY]
KINDS += [(op, 3) for op in known.TERNARY]
COMMON_KINDS = [kind for kind in KINDS if kind[0] in known.COMMON]
POSITIVE = ("log", "sqrt", "rsqrt", "logit", "pow", "pow_general", "reciprocal", "div")
INTEGERS = ("add", "mul", "eq", "clone", "copy_", "zeros_like", "where")
FP8_CAST = "fp8_cast"  # of libraries: scale and cast in one kernel
WINDOW_CLOCKS: Mapping[str, float] = assumed(__file__, "window_clocks")
CHEAP = ("add", "mul", "add_", "mul_", "copy_", "clone", "relu", "zeros_like", "ones_like", "fill_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """One call over ``numel`` elements; ``tensors`` counts its inputs that are not scalars.

    ``form`` is same (all operands alike), scalar, row or col (an operand is broadcast along rows or
    columns of ``inner`` elements), strided (runs of ``inner`` elements in another order) or
    transposed (the last axis, of length ``inner``, is not contiguous). In the first two ``inner``
    is ``numel``. ``dtype`` is the widest.
    """

    op: str
    numel: int
    inner: int = 1
    tensors: int = 1
    form: str = "same"
    dtype: str = "fp32"


def _draw(rng: np.random.Generator) -> Elementwise:
    """A random point: first its form, then an op that has this form, then sizes and dtype."""
    form = str(rng.choice(list(FORMS), p=list(FORMS.values())))
    kinds = COMMON_KINDS if rng.random() < 0.5 else KINDS
    op, tensors = kinds[int(rng.integers(len(kinds)))]  # tensors: how many it reads
    if form == "scalar":
        op, tensors = str(rng.choice(known.SCALAR)), 1
    elif form in ("row", "col"):
        op = str(rng.choice(known.BROADCAST))
    elif form != "same":
        op = str(rng.choice(known.TRANSPOSABLE))
    limit = 2**24 if op in CHEAP and form not in ("strided", "transposed") else 2**22
    numel = log_uniform(rng, 16, limit)
    inner = min(log_uniform(rng, 2, 4096), max(2, numel // 4))
    rows = max(2, numel // inner)
    if form == "strided":
        half = max(2, round(rows**0.5))
        rows = half * max(2, rows // half)  # ``build`` transposes (half, rows / half) runs
    if form in ("same", "scalar"):
        rows, inner = 1, numel
    else:
        tensors = 1 if op == "clone" else 2
    dtype = "bool" if op in ("logical_and", "logical_not") else "fp32"
    if (op in INTEGERS and rng.random() < 0.1) or (op == "_to_copy" and rng.random() < 0.3):
        dtype = "int64"
    return Elementwise(
        op=op, numel=rows * inner, inner=inner, tensors=tensors, form=form, dtype=dtype
    )


def build(p: Elementwise, device: str) -> Workload:
    """Random operands, positive where a function needs it; in-place ops keep their magnitude."""
    dtype, rows = torch_dtype(p.dtype), p.numel // p.inner
    integral = p.dtype in ("bool", "int64")
    shape: tuple[int, ...] = (rows, p.inner)
    if p.form == "strided":
        outer = max(2, round(rows**0.5))
        outer = next(n for n in range(outer, 0, -1) if rows % n == 0)
        shape = (outer, rows // outer, p.inner)
    second = {"row": (1, p.inner), "col": (rows, 1)}.get(p.form, shape)

    def operand(*shape: int) -> Tensor:
        x = repeated(torch.rand if p.op in (*POSITIVE, "mul_") else torch.randn, shape, device)
        if p.op in POSITIVE:
            x = x.mul_(0.5).add_(0.25)
        if p.op == "mul_":
            x = x.mul_(2e-4).add_(0.9999)  # by factors near 1 the other operand stays finite
        return (x > 0).to(dtype) if integral else x.to(dtype)

    def first() -> Tensor:
        if p.form not in ("strided", "transposed"):
            return operand(*shape)
        return operand(shape[1], shape[0], *shape[2:]).transpose(0, 1)

    zero = torch.zeros((), device=device, dtype=dtype)
    number = {"mul_": 1.0, "pow_general": 1.7}.get(p.op, 2.0)
    operands = {
        "x": first,
        **dict.fromkeys(("y", "z"), lambda: operand(*second)),
        "full": lambda: operand(*shape),
        "copied": first if second == shape else lambda: operand(*second),
        "mask": lambda: operand(*second) > 0,
        "other": lambda: operand(*shape) if second == shape else zero,
        "wide": lambda: operand(*second).expand(shape),
        "number": int(number) if integral else number,
        "buffer": lambda: torch.ops.aten.log_sigmoid_forward(operand(*shape))[1],
        "narrower": torch.bfloat16 if p.dtype == "fp32" else torch.float32,
        "contiguous": torch.contiguous_format,
    }
    return Workload(run=call_of(p.op.removesuffix("_general"), _arguments(p), operands))


def _arguments(p: Elementwise) -> Sequence[Any]:
    """What the op is called with, by the names of operands."""
    if p.tensors == 1 and p.form in ("row", "col"):
        return ["wide"] if p.op == "clone" or p.op in known.UNARY else ["wide", "number"]
    if p.tensors == 1 and p.op in known.SCALAR:
        return ["x", "number"]
    tensors = ["x", "y", "z"][: p.tensors]
    arguments: Sequence[Any] = (
        tensors if p.tensors == 3 else known.FACTS["calls"].get(p.op, tensors)
    )
    return arguments


def flops(p: Elementwise) -> Numbers:
    """One per element; transcendental functions cost more, which the model learns."""
    return 1.0 * p.numel


def bytes_moved(p: Elementwise) -> Numbers:
    """Full-size operands read once, the result written once; a mask counts as an operand.

    Fills and copies do not read what they overwrite; an allocation moves nothing. A cast to fp8
    writes a byte for each element.
    """
    not_moved = np.where(np.isin(p.form, ["row", "col"]), 1, 0) + np.where(
        is_any(p.op, known.WRITE_ONLY), 1, 0
    )
    operands = np.where(is_any(p.op, known.ALLOCATIONS), 0, p.tensors + 1 - not_moved)
    itemsize = itemsize_bytes(p.dtype)
    saved_bytes = np.where(is_any(p.op, (FP8_CAST,)), itemsize - 1, 0)
    return 1.0 * p.numel * (operands * itemsize - saved_bytes)


def gpu_memory_us(p: Elementwise, gpu: Gpu, cold: Values, stack: Values) -> Values:
    """Time in us to move the bytes from the last cache or from memory."""
    return moved_us(bytes_moved(p), gpu, cold)


def features(p: Elementwise, gpu: Gpu) -> dict[str, Numbers | str]:
    """Size, run length and form."""
    return {
        "op": p.op,
        "form": p.form,
        "dtype": p.dtype,
        "tensors": p.tensors,
        "log_numel": np.log2(np.maximum(p.numel, 1)),
        "log_inner": np.log2(np.maximum(p.inner, 1)),
        "log_rows": np.log2(np.maximum(p.numel, 1) / np.maximum(p.inner, 1)),
        "log_per_core": np.log2(np.maximum(p.numel, 1) / gpu.sm_count),
    }


def from_call(call: OpCall) -> Elementwise | None:
    """Describe a pointwise call: its largest tensor sets the size, other tensors the form."""
    _, name, overload = call.op.split(".")
    inputs, exponent = call.tensors(), call.args[1] if len(call.args) > 1 else None
    op = known.canonical(name, overload, exponent)
    if op in (*known.FILLS, *known.ALLOCATIONS):
        inputs = ()
    sized = [*inputs, *call.outputs[:1]] or [*call.tensors()[:1]]
    if not sized:
        return None
    numel = max(_distinct(t) for t in sized)
    numel = max(numel, *(t.numel for t in call.outputs[:1]), 1)
    used = [t for t in inputs if numel == 1 or _distinct(t) > 1]
    tensors = min(max(len(used), 1), 3 if op in known.TERNARY else 2)
    form, inner = _form(sized, used, numel)
    if tensors == 1 and op == "copy_":
        op = "fill_"
    scalar = known.SCALAR_AS.get(op, op)
    if tensors == 1 and form == "same" and scalar in known.SCALAR:
        op, form = scalar, "scalar"
    dtype = max((t.dtype for t in sized if t.numel == numel), key=itemsize_bytes, default="fp32")
    return Elementwise(op=op, numel=numel, inner=inner, tensors=tensors, form=form, dtype=dtype)


def _distinct(t: TensorSpec) -> int:
    """Elements in memory: an expanded axis counts once."""
    strides = t.stride or (1,) * len(t.shape)
    return prod(n for n, step in zip(t.shape, strides, strict=True) if step != 0)


def _form(sized: list[TensorSpec], used: list[TensorSpec], numel: int) -> tuple[str, int]:
    """``form`` and ``inner`` of a call over ``numel`` elements (see ``Elementwise``).

    ``sized``: its inputs and output; ``used``: inputs without scalars.
    """
    full = [t for t in sized if _distinct(t) == numel and t.stride]
    strided = [t for t in full if not t.contiguous]
    if strided and len({_strides(t) for t in full}) > 1:
        run = min(_run(t) for t in strided)
        last = next((n for n in reversed(strided[0].shape) if n > 1), 1)
        return ("strided", run) if run > 1 else ("transposed", last)
    broadcast = [t for t in used if _distinct(t) < numel]
    full_shape = next((t.shape for t in reversed(sized) if t.numel == numel), ())
    if not broadcast or not full_shape:
        return "same", numel
    t = max(broadcast, key=_distinct)
    padding = (0,) * (len(full_shape) - len(t.shape))
    strides = padding + (t.stride or tuple(int(n > 1) for n in t.shape))
    shape = (1,) * len(padding) + t.shape
    # of each axis its length, and whether the smaller operand is repeated along it
    axes = [
        (n, own == 1 or step == 0)
        for n, own, step in zip(full_shape, shape, strides, strict=True)
        if n > 1
    ]
    run, is_column = 1, bool(axes) and axes[-1][1]
    for n, repeats in reversed(axes):
        if repeats != is_column:
            break
        run *= n
    return ("col" if is_column else "row"), run


def _strides(t: TensorSpec) -> tuple[int, ...]:
    """Strides of the axes that are longer than 1."""
    return tuple(step for n, step in zip(t.shape, t.stride, strict=True) if n > 1)


def _run(t: TensorSpec) -> int:
    """How many elements lie side by side in memory, in row-major order of the axes."""
    run = 1
    for n, step in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if n > 1 and step != run:
            break
        run *= n
    return run


def resize(p: Elementwise, factor: float, first_share: float) -> Elementwise:
    """Grows the number of rows, then their length.

    Strided points keep a number of rows that is a product of two factors, as they are
    3-dimensional.
    """
    if p.form in ("same", "scalar"):
        numel = min(MAX_NUMEL, aligned(p.numel * factor, p.numel))
        return replace(p, numel=numel, inner=numel)
    old_rows = max(1, p.numel // p.inner)
    rows = max(2, round(old_rows * factor ** (0.5 + first_share / 2)))
    if p.form == "strided":
        half = max(2, isqrt(rows))
        rows = half * max(2, rows // half)
    row_factor = factor * old_rows / rows
    inner = min(max(MAX_SIDE, p.inner), max(2, aligned(p.inner * row_factor, p.inner)))
    return replace(p, numel=min(MAX_NUMEL // inner, rows) * inner, inner=inner)


def gpu_variant(p: Elementwise, rng: np.random.Generator) -> Elementwise | None:
    """The point, or None for an allocation, which launches no kernel."""
    return None if p.op in known.ALLOCATIONS else p


def memory_copy(nbytes: float) -> Part:
    """A pass over memory that reads and writes ``nbytes`` in all, as a product with a scalar."""
    numel = max(1, round(nbytes / 8))
    point = Elementwise(op="mul", numel=numel, inner=numel, tensors=1, form="scalar")
    return Part(family="elementwise", params=point)


def windowed_copy(outputs: float, taps: float, nbytes: float, gpu: Gpu) -> Part:
    """A pass over ``nbytes`` whose kernel computes each output from a window of ``taps`` inputs.

    Such kernels of torch, a thread per output, find indices and load operands one by one:
        time = bytes / bandwidth + outputs * (output + tap * taps) / (SMs * clock)
    """
    clocks = outputs * (WINDOW_CLOCKS["output"] + WINDOW_CLOCKS["tap"] * taps)
    busy_s = clocks / (gpu.sm_count * gpu.clock_hz)
    return replace(memory_copy(nbytes), times=1 + busy_s * gpu.hbm_bytes_per_s / nbytes)


FAMILY = Family(
    name="elementwise",
    params=Elementwise,
    sweep=lambda: map(_draw, repeat(np.random.default_rng(2))),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    gpu_memory_us=gpu_memory_us,
    features=features,
    answers=dict.fromkeys(known.names(), from_call),
    fusible=True,
    weight=3.0,
    gpu_sweep=GpuSweep(
        variant=gpu_variant,
        resize=resize,
        slow_frac=0.2,
        weight=1.5,
    ),
)
