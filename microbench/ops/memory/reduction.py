"""Reductions: softmax and its kin, sums, extremes, moments, scans and losses, both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, TensorSpec, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.calls import answers_of, call_of
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Workload,
    is_any,
    itemsize_bytes,
    logs,
    repeated,
)
from itercast.microbench.ops.memory.elementwise import Elementwise, memory_copy
from itercast.microbench.ops.sizes import MAX_NUMEL, MAX_ROWS, MAX_SIDE, points_of, scale_axes

SOFTMAX_BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")
SOFTMAX = ("_softmax", "_log_softmax", *SOFTMAX_BACKWARD)
MOMENTS = ("var", "var_mean", "std")
INDEXED = ("max", "min")  # with positions of the extremes
SCANS = ("cumsum",)
NLL_FORWARD = ("nll_loss_forward", "nll_loss2d_forward")
NLL_BACKWARD = ("nll_loss_backward", "nll_loss2d_backward")
NLL = (*NLL_FORWARD, *NLL_BACKWARD)
PAIRED = ("mse_loss", "mse_loss_backward", "binary_cross_entropy_with_logits")
FACTS = facts_of(__file__)
MAX_ELEMENTS = 2**23
BLOCK_BYTES: int = assumed(__file__, "block_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """outer x size x inner elements; ``size`` is what is reduced, or the classes of a loss.

    A loss without reduction has size 1.
    """

    op: str
    outer: int
    size: int
    inner: int = 1
    dtype: str = "fp32"


def _fits(p: Reduction) -> bool:
    return p.outer * p.size * p.inner <= MAX_ELEMENTS


def build(p: Reduction, device: str) -> Workload:
    """Random tensors: probabilities where a backward needs them, valid targets for losses."""
    dtype, image = torch_dtype(p.dtype), "2d" in p.op
    samples = (p.outer, p.inner, 1) if image else (p.outer,)
    shape = (p.outer, p.size) if p.inner == 1 else (p.outer, p.size, p.inner)
    x = repeated(torch.randn, shape, device)
    x = (x * 4).to(dtype) if dtype.is_floating_point else (x > 0).to(dtype)
    x = x.reshape(p.outer, p.size, p.inner, 1) if image else x
    mean, scalar = p.size > 1, torch.ones((), device=device, dtype=dtype)
    operands = {
        "x": x,
        "dtype": dtype,
        "softmax": lambda: torch.softmax(x, 1),
        "log_softmax": lambda: torch.log_softmax(x, 1),
        "class": lambda: torch.randint(0, p.size, samples, device=device),
        "one": scalar,
        "count": scalar * prod(samples),
        "target": lambda: torch.rand_like(x),
        "gradient": lambda: scalar if mean else torch.rand_like(x),
        "mode": int(mean),
    }
    return Workload(run=call_of(p.op, FACTS["calls"][p.op], operands))


def flops(p: Reduction) -> Numbers:
    """Per element: softmax 5, moments 4, logsumexp 3, cross entropy of logits 8, else 2.

    nll: 2 per sample forward and backward; it touches one class of each.
    """
    per_element = np.where(is_any(p.op, SOFTMAX), 5.0, 2.0)
    per_element = np.where(is_any(p.op, MOMENTS), 4.0, per_element)
    per_element = np.where(is_any(p.op, ("logsumexp",)), 3.0, per_element)
    per_element = np.where(is_any(p.op, ("binary_cross_entropy_with_logits",)), 8.0, per_element)
    return per_element * p.outer * p.inner * np.where(is_any(p.op, NLL), 1, p.size)


def bytes_moved(p: Reduction) -> Numbers:
    """Inputs read once, outputs written once (as if of the input's dtype).

    Softmax and scans write what they read; backwards read two tensors and write one; a sum writes
    outer x inner; nll reads one element and one int64 target per sample, its backward writes all.
    """
    itemsize = itemsize_bytes(p.dtype)
    results = 1.0 * p.outer * p.inner
    elements = results * p.size
    read = np.where(is_any(p.op, (*SOFTMAX_BACKWARD, *PAIRED)), 2.0, 1.0) * elements
    writes_all = is_any(p.op, (*SOFTMAX, *SCANS, "mse_loss_backward"))
    reduced = np.where(is_any(p.op, ("var_mean",)), 2.0, 1.0) * results
    written = np.where(writes_all, elements, reduced)
    positions = np.where(is_any(p.op, INDEXED), 8.0, 0.0) * results
    nll_backward = is_any(p.op, NLL_BACKWARD)
    of_nll = results * 8 + np.where(nll_backward, elements, results) * itemsize
    return np.where(is_any(p.op, NLL), of_nll, (read + written) * itemsize + positions)


def features(p: Reduction, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, results per core, and how well rows fill vectors."""
    waves = 1.0 * p.outer * p.inner / gpu.sm_count
    return {
        "op": p.op,
        "dtype": p.dtype,
        **logs(p, "outer", "size", "inner"),
        "columns": np.where(np.greater(p.inner, 1), 1.0, 0.0),
        "whole": np.where(np.equal(p.outer * p.inner, 1), 1.0, 0.0),
        "log_rows_per_core": np.log2(waves),
        "wave_fill": waves / np.ceil(waves),
        "log_size_per_row": np.log2(p.size / (1.0 * p.outer * p.inner)),
        "size_mod_16": p.size % 16,
        "inner_mod_16": p.inner % 16,
    }


def from_softmax(call: OpCall) -> Reduction:
    """Describe _softmax(x, dim) or its backward (grad, y, dim); copies of strides are ignored."""
    op = call.op.split(".")[1]
    x = call.args[0]
    dim = call.args[2 if op.endswith("data") else 1]
    return _split(op, x.shape, (dim,), x.dtype)


def from_sum(call: OpCall) -> Reduction:
    """Describe sum(x), mean.dim(x, dims), max.dim(x, dim), linalg_vector_norm and the like.

    Axes are taken in the order of memory: the kernels reorder them so.
    """
    op, overload = call.op.split(".")[1:3]
    op = FACTS["same_as"].get(op, op)
    x, position = call.args[0], 2 if op == "linalg_vector_norm" else 1
    dims = call.argument(position, "dim")
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    reduced = dims if isinstance(dims, tuple) and dims else tuple(range(len(x.shape)))
    if op in ("max", "min") and overload == "default":
        op = f"a{op}"  # no indices
    shape, reduced = _memory_order(x, reduced)
    return _split(op, shape, reduced, x.dtype)


def _memory_order(x: TensorSpec, dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape with axes sorted by stride, largest first, and where ``dims`` are among these axes."""
    rank = len(x.shape)
    if rank == 0 or len(x.stride) != rank or min(x.stride) < 1:
        return x.shape, dims
    order = sorted(range(rank), key=lambda d: -x.stride[d])
    return tuple(x.shape[d] for d in order), tuple(order.index(d % rank) for d in dims)


def _split(op: str, shape: tuple[int, ...], dims: tuple[int, ...], dtype: str) -> Reduction:
    """Sizes around the reduced axes; axes between reduced ones count as outer."""
    dims = tuple(d % len(shape) for d in dims) if shape else ()
    inner = prod(shape[max(dims) + 1 :]) if dims else 1
    size = prod(shape[d] for d in dims)
    outer = prod(shape) // max(1, size * inner)
    return Reduction(
        op=op, outer=max(1, outer), size=max(1, size), inner=max(1, inner), dtype=dtype
    )


def from_nll(call: OpCall) -> Reduction:
    """Describe nll_loss_forward(x, target, ...) or its backward (grad, x, target, ...)."""
    op = call.op.split(".")[1]
    x = call.args[1] if op.endswith("backward") else call.args[0]
    return _split(op, x.shape, (1 if len(x.shape) > 1 else 0,), x.dtype)


def from_paired(call: OpCall) -> Reduction:
    """Describe mse_loss(x, target, reduction=1), its backward (grad, x, target, ...), or BCE.

    Losses that run the same kernels as mse_loss count as it.
    """
    op = call.op.split(".")[1]
    x, position = (call.args[1], 3) if op.endswith("backward") else (call.args[0], 2)
    op = FACTS["same_as"].get(op, op)
    position = 4 if op == "binary_cross_entropy_with_logits" else position
    mode = call.argument(position, "reduction", 1)
    count = max(1, x.numel)
    outer, size = (count, 1) if mode == 0 else (1, count)
    return Reduction(op=op, outer=outer, size=size, dtype=x.dtype)


def resize(p: Reduction, factor: float, first_share: float) -> Reduction:
    """Grows the rows, then their length; losses that read one class per row grow by rows alone."""
    if p.op in NLL_FORWARD:
        return p
    if p.outer == 1 and not p.op.startswith("nll"):
        return scale_axes(p, factor, 1.0, {"size": MAX_NUMEL})
    if p.size == 1:
        return scale_axes(p, factor, 1.0, {"outer": MAX_NUMEL})
    return scale_axes(p, factor, 0.5 + first_share / 2, {"outer": MAX_ROWS, "size": MAX_SIDE})


def allocated_bytes(p: Reduction) -> float:
    """All classes of a loss, though it reads one a row."""
    return 1.0 * p.outer * p.size * p.inner * float(itemsize_bytes(p.dtype))


def fallback(p: Reduction, measured: Measured) -> list[Part]:
    """Prices a reduction that no model has seen on a GPU as kernels that models may have seen.

    Softmax backward multiplies gradient and output, then runs log-softmax's kernel (torch 2.1,
    SoftMax.cu); a row too long for a block is read and written as often as in the forward, which
    then stands for it. A loss's backward writes zeros: a copy of its bytes, as are other
    reductions. Softmax and a loss's forward, and what is left of them, are priced by a roofline.
    """
    if measured.gpu.kind == "cpu" or measured.seen("reduction", p.op, p.dtype):
        return []
    kernel = Part(family="reduction", params=p)
    row_bytes = p.size * itemsize_bytes(p.dtype)
    if p.op in SOFTMAX_BACKWARD and p.inner == 1 and row_bytes > BLOCK_BYTES:
        forward = replace(p, op=p.op.removesuffix("_backward_data"))
        kernel = Part(family="reduction", params=forward, checked=True)
    if p.op == "_softmax_backward_data":
        numel = p.outer * p.size * p.inner
        product = Elementwise(op="mul", numel=numel, inner=numel, tensors=2, dtype=p.dtype)
        return [kernel, Part(family="elementwise", params=product)]
    if p.op in (*SOFTMAX, *NLL_FORWARD):
        return [kernel] if kernel.checked else []
    return [replace(memory_copy(float(bytes_moved(p))), checked=p.op in NLL)]


FAMILY = Family(
    name="reduction",
    params=Reduction,
    sweep=points_of(6, FACTS["sweep"], Reduction, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers=answers_of(FACTS["answers"], from_softmax, from_sum, from_nll, from_paired),
    gpu_sweep=GpuSweep(
        resize=resize,
        allocated_bytes=allocated_bytes,
        slow_frac=0.1,
        weight=1.0,
    ),
    fusible=True,
    fallback=fallback,
)
