"""Elementwise ops: unary, binary, activations and their backwards, casts, copies, fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, TensorSpec
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype

UNARY: tuple[str, ...] = (
    "neg",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "relu",
    "gelu",
    "silu",
    "abs",
)
UNARY += ("cos", "sin", "reciprocal", "clone", "empty_like", "zeros_like", "ones_like")
SCALAR = ("mul", "add", "pow", "eq", "div_", "clamp_min", "fill_", "zero_")
BINARY: tuple[str, ...] = (
    "add",
    "sub",
    "mul",
    "div",
    "add_",
    "mul_",
    "copy_",
    "threshold_backward",
)
BINARY += ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "maximum")
TRANSPOSABLE = ("clone", "copy_", "add", "mul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """One call; ``inner`` is the length of a small or strided operand's contiguous run.

    ``form`` is same (all operands alike), row or col (one operand is broadcast along rows or
    columns), scalar, or strided (an operand is a transposed view).
    """

    op: str
    numel: int
    inner: int = 1
    tensors: int = 1
    form: str = "same"
    dtype: str = "fp32"


def sweep() -> Iterator[Elementwise]:
    """Endless: every op and form, 16 to 16M elements."""
    rng = np.random.default_rng(2)
    while True:
        form = str(rng.choice(["same", "row", "col", "scalar", "strided"]))
        numel = log_uniform(rng, 16, 2**24)
        inner = min(log_uniform(rng, 8, 4096), numel)
        names = {"row": ("add", "mul"), "col": ("mul", "sub", "div"), "scalar": SCALAR}
        two = form != "scalar" and (form in names or rng.random() < 0.5)
        choice = names.get(form) or (BINARY if two else UNARY)
        op = str(rng.choice(TRANSPOSABLE if form == "strided" else choice))
        two = two or (form == "strided" and op != "clone")
        yield Elementwise(
            op=op,
            numel=numel // inner * inner,
            inner=inner,
            tensors=2 if two else 1,
            form=form,
        )


def build(p: Elementwise, device: str) -> Workload:
    """Positive random operands, so that log and pow stay finite."""
    import torch  # lazy: formulas must import where torch is absent

    aten = torch.ops.aten
    rows = p.numel // p.inner
    dtype = torch_dtype(p.dtype)
    x = torch.rand(rows, p.inner, device=device).add_(0.5).to(dtype)
    if p.form == "strided":
        x = torch.rand(p.inner, rows, device=device).to(dtype).t()
        if p.op == "clone":
            return Workload(run=lambda: x.clone(memory_format=torch.contiguous_format))
    if p.form == "scalar":
        if p.op in ("fill_", "div_"):
            value = {"fill_": 0.0, "div_": 0.999}[p.op]
            return Workload(run=lambda: getattr(x, p.op)(value))
        if p.op == "zero_":
            return Workload(run=lambda: x.zero_())
        return Workload(run=lambda: getattr(aten, p.op)(x, 2.0))
    if p.tensors == 1:
        return Workload(run=lambda: getattr(aten, p.op)(x))
    shapes = {"row": (1, p.inner), "col": (rows, 1)}
    y = torch.rand(shapes.get(p.form, (rows, p.inner)), device=device).add_(0.5).to(dtype)
    if p.op.endswith("_"):
        return Workload(run=lambda: getattr(y, p.op)(x))
    extra = (0.0,) if p.op == "threshold_backward" else ()
    return Workload(run=lambda: getattr(aten, p.op)(x, y, *extra))


def flops(p: Any) -> Any:
    """One per element; transcendental functions cost more, which the model learns."""
    return 1.0 * p.numel


def bytes_moved(p: Any) -> Any:
    """Full-size operands read once, the result written once."""
    small = np.where(np.isin(p.form, ["row", "col"]), 1, 0)
    return 1.0 * p.numel * (p.tensors + 1 - small) * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
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
    """Any pointwise call: its largest tensor sets the size, the others the form."""
    inputs = call.tensors()
    sized = [*inputs, *call.outputs]
    if not sized or not all(isinstance(t, TensorSpec) for t in sized):
        return None
    big = max(sized, key=lambda t: t.numel)
    op = call.op.split(".")[1]
    others = [t for t in inputs if t.numel < big.numel and t.numel > 1]
    strided = [t for t in inputs if t.numel == big.numel and not t.contiguous]
    form, inner = "same", big.shape[-1] if big.shape else 1
    if strided and op != "empty_like":
        form = "strided"
        inner = min((s for s in strided[0].stride if s > 1), default=1)
    elif others:
        form = "col" if others[0].shape and others[0].shape[-1] == 1 else "row"
    elif len(inputs) == 1 and len(call.args) > 1 and op in SCALAR:
        form = "scalar"
    return Elementwise(
        op=op,
        numel=max(big.numel, 1),
        inner=max(inner, 1),
        tensors=min(max(len(inputs), 1), 2),
        form=form,
        dtype=big.dtype,
    )


def _overloads() -> Iterator[str]:
    more: tuple[str, ...] = (
        "where",
        "masked_fill",
        "masked_fill_",
        "clamp",
        "minimum",
        "ne",
        "lt",
        "gt",
        "ge",
    )
    more += ("le", "logical_not", "bitwise_and", "addcmul", "addcdiv", "sub_", "_to_copy", "rsub")
    more += ("full_like", "full", "zeros", "ones", "arange", "empty", "new_zeros", "new_full")
    more += ("new_empty", "new_empty_strided", "empty_strided", "fill", "scalar_tensor", "square")
    for op in {*UNARY, *SCALAR, *BINARY, *more}:
        for overload in ("default", "Tensor", "Scalar", "self", "float", "Tensor_Scalar"):
            yield f"aten.{op}.{overload}"
    yield from ("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.arange.start")
    yield from ("aten.eq.Scalar", "aten.add_.Tensor", "aten.empty.memory_format")
    yield from ("aten.arange.start_step", "aten.pow.Tensor_Tensor")


FAMILY = Family(
    name="elementwise",
    params=Elementwise,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers=dict.fromkeys(_overloads(), from_call),
)
