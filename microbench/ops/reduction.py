"""Reductions: softmax and its kin, sums, means, losses, both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype

SOFTMAX = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
SUMS = ("sum", "mean", "max", "amax")
LOSSES = ("nll_loss_forward", "nll_loss_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """outer x size x inner elements; ``size`` is what is reduced."""

    op: str
    outer: int
    size: int
    inner: int = 1
    dtype: str = "fp32"


def sweep() -> Iterator[Reduction]:
    """Endless: up to 16M elements; rows and columns."""
    rng = np.random.default_rng(6)
    while True:
        op = str(rng.choice(SOFTMAX + SUMS + LOSSES))
        outer, size = log_uniform(rng, 1, 16384), log_uniform(rng, 2, 65536)
        inner = log_uniform(rng, 1, 4096) if op in ("sum", "mean") and rng.random() < 0.6 else 1
        if outer * size * inner <= 2**23:
            yield Reduction(op=op, outer=outer, size=size, inner=inner)


def build(p: Reduction, device: str) -> Workload:
    """Probabilities where a backward needs them, valid targets for the loss."""
    import torch  # lazy: formulas must import where torch is absent

    aten, dtype = torch.ops.aten, torch_dtype(p.dtype)
    x = torch.randn(p.outer, p.size, p.inner, device=device).to(dtype)
    if p.op in SUMS:
        return Workload(run=lambda: getattr(x, p.op)(1))
    x = x[:, :, 0].contiguous()
    if p.op in ("_softmax", "_log_softmax"):
        return Workload(run=lambda: getattr(aten, p.op)(x, -1, False))
    y = torch.softmax(x, -1)
    if p.op in SOFTMAX:
        return Workload(run=lambda: getattr(aten, p.op)(x, y, -1, dtype))
    target = torch.randint(0, p.size, (p.outer,), device=device)
    if p.op == "nll_loss_forward":
        return Workload(run=lambda: aten.nll_loss_forward(x, target, None, 1, -100))
    grad, total = torch.ones((), device=device), torch.tensor(float(p.outer), device=device)
    back = aten.nll_loss_backward
    return Workload(run=lambda: back(grad, x, target, None, 1, -100, total))


def flops(p: Any) -> Any:
    """Two per element, five for softmax."""
    return np.where(np.isin(p.op, SOFTMAX), 5.0, 2.0) * p.outer * p.size * p.inner


def bytes_moved(p: Any) -> Any:
    """Softmax writes what it reads; its backward reads twice; a sum writes little."""
    passes = np.where(np.isin(p.op, SOFTMAX[:2]), 2, np.where(np.isin(p.op, SOFTMAX), 3, 1))
    return 1.0 * passes * p.outer * p.size * p.inner * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes and rows per core."""
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_outer": np.log2(p.outer),
        "log_size": np.log2(p.size),
        "log_inner": np.log2(p.inner),
        "log_rows_per_core": np.log2(p.outer * p.inner / gpu.sm_count),
        "size_mod_16": p.size % 16,
    }


def from_softmax(call: OpCall) -> Reduction:
    """_softmax(x, dim), _softmax_backward_data(grad, y, dim)."""
    op = call.op.split(".")[1]
    x = call.args[0]
    dim = call.args[2 if op.endswith("data") else 1] % len(x.shape)
    return _split(op, x, (dim,))


def from_sum(call: OpCall) -> Reduction:
    """sum(x), sum.dim_IntList(x, dims), mean.dim(x, dims), max.dim(x, dim)."""
    x = call.args[0]
    dims = call.args[1] if len(call.args) > 1 else None
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    every = tuple(range(len(x.shape)))
    chosen = tuple(d % len(x.shape) for d in dims) if isinstance(dims, tuple) and dims else every
    op = call.op.split(".")[1]
    return _split(op, x, chosen)


def _split(op: str, x: Any, dims: tuple[int, ...]) -> Reduction:
    shape = x.shape
    inner = prod(shape[max(dims) + 1 :]) if dims else 1
    size = prod(shape[d] for d in dims)
    outer = max(1, x.numel // max(1, size * inner))
    return Reduction(op=op, outer=outer, size=max(1, size), inner=max(1, inner), dtype=x.dtype)


def from_nll(call: OpCall) -> Reduction:
    """nll_loss_forward(x, target, ...), nll_loss_backward(grad, x, target, ...)."""
    op = call.op.split(".")[1]
    x = call.args[1] if op.endswith("backward") else call.args[0]
    return Reduction(op=op, outer=x.shape[0], size=x.shape[-1], dtype=x.dtype)


SUM_NAMES = ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "max.dim")
FAMILY = Family(
    name="reduction",
    params=Reduction,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={
        **{f"aten.{op}.default": from_softmax for op in SOFTMAX},
        **{f"aten.{op}.default": from_nll for op in LOSSES},
        **{f"aten.{name}": from_sum for name in (*SUM_NAMES, "amax.default")},
    },
)
