"""Modules timed as a whole: losses, norms, rotary embedding and MLPs, one pass or both.

In eager PyTorch each is several ops of other families, each of which reads and writes the whole
tensor; compilers and libraries fuse them into one or two kernels. A captured step has the single
ops, so no call is described by this family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import ITEMSIZE_BYTES
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Workload,
    by_name,
    is_any,
    itemsize_bytes,
    log_uniform,
    repeated,
    torch_dtype,
)
from itercast.microbench.ops.sizes import MAX_ROWS, resize_along

# How often rows x cols numbers are read or written in fused kernels, forward and backward.
PASSES: dict[str, tuple[float, float]] = {
    "cross_entropy": (1, 2),  # backward reads the logits and writes their gradient
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),  # reads two tensors, writes their sum and its norm
    "layer_norm": (2, 3),
    "group_norm": (2, 3),
    "batch_norm": (2, 3),
    "rope": (2, 2),
    "swiglu": (3, 5),  # of two halves of the input
    "relu_squared": (2, 3),
    "tvd": (2, 3),  # total variation distance of two distributions
    "swiglu_mlp": (2, 4),
    "geglu_mlp": (2, 4),
    "linear_cross_entropy": (1, 2),
}
WAYS = ("forward", "backward")
COUNTS = ("own", "wide", "casts", "kernels")  # what ``eager_chains`` counts
EAGER: dict[str, dict[str, list[float]]] = assumed(__file__, "eager_chains")
KERNEL_US: float = assumed(__file__, "kernel_us")
MEMORY_SHARE: Mapping[str, float] = assumed(__file__, "memory_share")
WIDE_BYTES = ITEMSIZE_BYTES["fp32"]  # of the numbers that a chain casts to fp32
FLOPS_PER_ELEMENT: float = assumed(__file__, "flops_per_element")
MATRICES = {"swiglu_mlp": 3, "geglu_mlp": 3, "linear_cross_entropy": 1}  # of cols x inner
OPS = tuple(PASSES)
DIRECTIONS = {"forward": (1, 0), "backward": (0, 1), "full": (1, 1)}
MAX_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One call of a layer (norm, loss, rope, MLP...) on a tensor of rows x cols.

    - ``direction``: forward, backward or full (both).
    - ``cols``: width that is normalised; classes of a loss; for rope the queries and keys of all
      heads together.
    - ``inner``: other width of linear layers: intermediate width of an MLP, vocabulary of
      linear_cross_entropy; 0 where there is none.
    - ``eager``: one kernel after the other, as eager PyTorch runs it, instead of fused kernels.
    """

    op: str
    direction: str
    rows: int
    cols: int
    inner: int = 0
    dtype: str = "fp32"
    eager: bool = True


def sweep() -> Iterator[Module]:
    """Yields points without end, up to 4M elements."""
    rng = np.random.default_rng(23)
    while True:
        op = str(rng.choice(OPS))
        rows, cols = log_uniform(rng, 16, 8192), 32 * log_uniform(rng, 1, 1024)
        inner = 32 * log_uniform(rng, 1, 64) if op in MATRICES else 0
        direction = str(rng.choice(list(DIRECTIONS)))
        if rows * max(cols, inner) <= MAX_ELEMENTS and cols * inner <= MAX_ELEMENTS:
            yield Module(op=op, direction=direction, rows=rows, cols=cols, inner=inner)


def build(p: Module, device: str) -> Workload:
    """The module in eager PyTorch as model code writes it; a backward keeps its graph."""
    import torch  # lazy: formulas must import where torch is absent

    def tensor(*shape: int) -> Any:
        return repeated(torch.randn, shape, device).to(torch_dtype(p.dtype)).requires_grad_()

    call, leaves = _module(p, tensor)

    def forward() -> Any:
        return call(*leaves)

    if p.direction == "forward":
        return Workload(run=forward, through_aten=False)
    y = forward()
    grad = torch.randn_like(y)
    if p.direction == "backward":
        back = lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)  # noqa: E731
        return Workload(run=back, through_aten=False)
    return Workload(run=lambda: torch.autograd.grad(forward(), leaves, grad), through_aten=False)


def _module(p: Module, tensor: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A function and the tensors it is differentiated by."""
    import torch
    import torch.nn.functional as F

    x, w = tensor(p.rows, p.cols), tensor(p.cols)

    def rms(a: Any, scale: Any) -> Any:
        wide = a.float()
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)

    if p.op in ("cross_entropy", "linear_cross_entropy"):
        target = torch.randint(0, p.inner or p.cols, (p.rows,), device=x.device)
        if p.op == "cross_entropy":
            return lambda a: F.cross_entropy(a, target), [x]
        return lambda a, b: F.cross_entropy(F.linear(a, b), target), [x, tensor(p.inner, p.cols)]
    if p.op in ("swiglu_mlp", "geglu_mlp"):
        act = F.silu if p.op == "swiglu_mlp" else F.gelu
        weights = [tensor(p.inner, p.cols), tensor(p.inner, p.cols), tensor(p.cols, p.inner)]

        def mlp(a: Any, gate: Any, up: Any, down: Any) -> Any:
            return F.linear(act(F.linear(a, gate)) * F.linear(a, up), down)

        return mlp, [x, *weights]
    other, half = tensor(p.rows, p.cols), p.cols // 2
    images = (p.rows, p.cols, 1)
    found: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "rms_norm": (rms, [x, w]),
        "add_rms_norm": (lambda a, b, scale: rms(a + b, scale), [x, other, w]),
        "layer_norm": (lambda a, s, b: F.layer_norm(a, (p.cols,), s, b), [x, w, tensor(p.cols)]),
        "group_norm": (lambda a, s: F.group_norm(a.view(images), 8, s), [x, w]),
        "batch_norm": (lambda a, s: F.batch_norm(a, None, None, s, training=True), [x, w]),
        "rope": (
            lambda a: a * other.detach() + torch.cat((-a[:, half:], a[:, :half]), -1) * w.detach(),
            [x],
        ),
        "swiglu": (lambda a, b: F.silu(a) * b, [x, other]),
        "relu_squared": (lambda a: F.relu(a).square(), [x]),
        "tvd": (lambda a: 0.5 * (a - other.detach()).abs().sum(-1).mean(), [x]),
    }
    return found[p.op]


def _of_directions(p: Any, forward: Any, backward: Any) -> Any:
    either = [
        sum(1.0 * np.asarray(is_any(p.direction, (d,))) * n[at] for d, n in DIRECTIONS.items())
        for at in (0, 1)
    ]
    return either[0] * forward + either[1] * backward


def _matrices(p: Any) -> Any:
    return sum(1.0 * np.asarray(is_any(p.op, (op,))) * count for op, count in MATRICES.items())


def flops(p: Any) -> Any:
    """FLOPS_PER_ELEMENT; linear layers 2 * rows * cols * inner each, twice that backward."""
    products = _matrices(p) * 2.0 * p.rows * p.cols * p.inner
    elements = FLOPS_PER_ELEMENT * p.rows * p.cols
    return _of_directions(p, products + elements, 2 * products + elements)


def bytes_moved(p: Any) -> Any:
    """Lower bound: reads and writes of rows x cols numbers, and weights of linear layers.

    A fused kernel has its PASSES. An eager chain (``eager_chains``) counts numbers in the tensor's
    dtype, numbers in fp32, and casts between the two, which an fp32 tensor needs none of. Forward
    reads the weights once; backward reads them and writes their gradients.
    """
    width = itemsize_bytes(p.dtype)
    casts = np.where(width < WIDE_BYTES, width + WIDE_BYTES, 0.0)
    weights = _matrices(p) * p.cols * p.inner * width
    chain = []
    for way in WAYS:
        own, wide, cast, _ = (_counted(p, way, what) for what in COUNTS)
        chain.append(own * width + wide * WIDE_BYTES + cast * casts)
    fused = [_by_op(p, {op: n[at] for op, n in PASSES.items()}) * width for at in (0, 1)]
    one, two = (np.where(p.eager, c, f) for c, f in zip(chain, fused, strict=True))
    elements = 1.0 * p.rows * p.cols
    return _of_directions(p, one * elements + weights, two * elements + 2 * weights)


def _by_op(p: Any, values: Mapping[str, float]) -> Any:
    return sum(np.asarray(is_any(p.op, (op,))) * float(value) for op, value in values.items())


def _counted(p: Any, way: str, what: str) -> Any:
    """A count of the op's eager chain in one direction; ops without a chain have their PASSES."""
    at, one = COUNTS.index(what), WAYS.index(way)
    found = {op: float(chain[way][at]) for op, chain in EAGER.items()}
    if what in ("own", "kernels"):
        alone = {op: passes[one] if what == "own" else 1.0 for op, passes in PASSES.items()}
        found = {**alone, **found}
    return _by_op(p, found)


def floor_us(p: Any, gpu: Gpu) -> Any:
    """Larger of compute and memory bound in us, and KERNEL_US for each kernel of the chain.

    Kernels reach MEMORY_SHARE of the memory's peak: the longer the chain's bound, the more of its
    time is this; a short chain takes what its kernels take at least.
    """
    rate = by_name(p.dtype, {name: gpu.full_rate(name) for name in np.unique(p.dtype)})
    share = np.where(p.eager, MEMORY_SHARE["eager"], MEMORY_SHARE["fused"])
    memory_s = bytes_moved(p) / (gpu.hbm_bytes_per_s * share)
    bound_us = 1e6 * np.maximum(flops(p) / rate, memory_s)
    chain = _of_directions(p, *(_counted(p, way, "kernels") for way in WAYS))
    products = _matrices(p) * _of_directions(p, 1, 2)
    return bound_us + KERNEL_US * (np.where(p.eager, chain, _of_directions(p, 1, 1)) + products)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes, rows per core, and whether the ops are fused."""
    return {
        "op": p.op,
        "eager": 1.0 * np.asarray(p.eager, dtype=float),
        "direction": p.direction,
        "dtype": p.dtype,
        "log_rows": np.log2(p.rows),
        "log_cols": np.log2(p.cols),
        "log_inner": np.log2(np.maximum(p.inner, 1)),
        "log_elements": np.log2(1.0 * p.rows * p.cols),
        "log_rows_per_core": np.log2(p.rows / gpu.sm_count),
        "cols_mod_16": p.cols % 16,
    }


def op_name(p: Any) -> Any:
    """The op with its direction: a backward is another measurement than a forward."""
    if isinstance(p.op, str):
        return f"{p.op} {p.direction}"
    return np.array([f"{op} {way}" for op, way in zip(p.op, p.direction, strict=True)], object)


FAMILY = Family(
    name="module",
    params=Module,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
    op_name=op_name,
    floor_us=floor_us,
    on_demand=True,
    gpu_sweep=GpuSweep(resize=resize_along({"rows": MAX_ROWS}), slow_frac=0.05),
)
