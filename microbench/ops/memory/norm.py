"""Normalisation: layer, RMS, batch and group norm, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
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
    by_name,
    differentiated,
    is_any,
    itemsize_bytes,
    logs,
)
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.traffic import computed_us, is_generated, moved_us
from itercast.microbench.ops.sizes import (
    MAX_BATCH,
    MAX_PIXELS_A_SIDE,
    MAX_ROWS,
    MAX_SIDE,
    points_of,
    scale_axes,
)

FLOPS_PER_ELEMENT = {  # no assumption: counted in the formula of each op
    "layer": 8.0,  # mean 1, variance 3, normalise 2, scale and shift 2
    "layer_backward": 12.0,
    "rms": 4.0,  # mean square 2, normalise 1, scale 1
    "rms_backward": 8.0,
    "batch": 8.0,
    "batch_backward": 12.0,
    "batch_eval": 2.0,  # one scale and shift per channel
    "batch_eval_backward": 5.0,
    "group": 8.0,
    "group_backward": 12.0,
}
FACTS = facts_of(__file__)
MAX_ELEMENTS = 2**23
PASSES: Mapping[str, int] = assumed(__file__, "passes")
CLOCKS: Mapping[str, float] = assumed(__file__, "clocks")
BLOCK_RATE: float = assumed(__file__, "block_rate")
# Tensors that a pass over statistics reads. Source: as PASSES.
STATISTICS = {"batch": 1, "batch_backward": 2, "group": 1, "group_backward": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """One call on rows x cols (layer, rms: cols normalised) or rows x channels x cols.

    batch, group: ``rows`` samples, ``channels``, ``cols`` positions each; batch_eval uses running
    statistics. All have a scale; all but rms a shift.
    """

    op: str
    rows: int
    cols: int
    channels: int = 1
    groups: int = 1
    dtype: str = "fp32"


def _norm(groups: int = 1, **fields: Any) -> Norm:
    """A point from sizes as the YAML file states them; ``groups`` 0: as many as channels."""
    return Norm(groups=groups or fields["channels"], **fields)


def _fits(p: Norm) -> bool:
    return p.channels % p.groups == 0 and p.rows * p.cols * p.channels <= MAX_ELEMENTS


def build(p: Norm, device: str) -> Workload:
    """Random tensors; a backward gets the statistics of a real forward."""
    dtype = torch_dtype(p.dtype)
    by_row = p.op.startswith(("layer", "rms"))
    shape = (p.rows, p.cols) if by_row else (p.rows, p.channels, p.cols, 1)
    x, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    w = torch.rand(p.cols if by_row else p.channels, device=device).to(dtype)
    if p.op.startswith("batch") and device != "cpu":
        return _batch_of_models(p, x, grad, w)
    base = p.op.removesuffix("_backward")
    operands: dict[str, Any] = {
        **{"x": x, "gradient": grad, "w": w, "all": [True] * 3, "train": "eval" not in p.op},
        **{name: getattr(p, name) for name in ("rows", "channels", "cols", "groups")},
        **{"zeros": torch.zeros_like(w), "ones": torch.ones_like(w)},
        "mean": lambda: _call(base, operands)()[1],
        "rstd": lambda: _call(base, operands)()[2],
    }
    if p.op != "rms_backward":
        return Workload(run=_call(p.op, operands))
    leaves = [t.requires_grad_() for t in (x, w)]  # through autograd, as a CPU decomposes it
    return differentiated(_call(base, operands)()[0], leaves, grad)


def _call(op: str, operands: Mapping[str, Any]) -> Callable[[], Any]:
    """The op's call, as the YAML file states it."""
    name, *arguments = FACTS["calls"][op]
    return call_of(name, arguments, operands)


def _batch_of_models(p: Norm, x: Tensor, grad: Tensor, w: Tensor) -> Workload:
    """The call of ``nn.BatchNorm``, where torch chooses between cuDNN and its own kernels.

    The choice goes by dtype, number of samples, mode and axes (_select_batch_norm_backend in
    ATen/native/Normalization.cpp); two axes, where there is one position, are never cuDNN's.
    """
    x, grad = (t.flatten(1) if p.cols == 1 else t for t in (x, grad))
    mean, var, bias = torch.zeros_like(w), torch.ones_like(w), torch.zeros_like(w)
    for leaf in (x, w, bias):
        leaf.requires_grad_(p.op.endswith("backward"))

    def run() -> Tensor:
        return torch.batch_norm(x, w, bias, mean, var, "eval" not in p.op, 0.1, 1e-5, True)

    if p.op.endswith("backward"):
        return differentiated(run(), [x, w, bias], grad)
    return Workload(run=run, through_aten=False)


def _is(p: Norm, *kinds: str) -> Values:
    """Whether the op is one of these."""
    return is_any(p.op, kinds)


def _backward(p: Norm) -> Values:
    return _is(p, *(o for o in FLOPS_PER_ELEMENT if o.endswith("backward")))


def flops(p: Norm) -> Values:
    """FLOPS_PER_ELEMENT times the elements."""
    return by_name(p.op, FLOPS_PER_ELEMENT) * p.rows * p.cols * p.channels


def bytes_moved(p: Norm) -> Values:
    """Forward reads x, writes y, reads the weights; backward reads x and dy, writes dx and dw.

    Lower bound: statistics are left out, and a forward reads x once although it needs it twice.
    """
    passes = np.where(_backward(p), 3.0, 2.0)
    by_row = _is(p, "layer", "layer_backward", "rms", "rms_backward")
    vectors = np.where(_is(p, "rms", "rms_backward"), 1.0, 2.0)
    vectors = np.where(_backward(p), vectors + 1, vectors)  # dw (and db) written, w read
    weights = vectors * np.where(by_row, p.cols, p.channels)
    return (passes * p.rows * p.cols * p.channels + weights) * itemsize_bytes(p.dtype)


def traffic_bytes(p: Norm) -> Values:
    """Bytes that the kernels read and write: PASSES over the tensor, two of a forward by rows."""
    passes = by_name(p.op, {"layer": 2.0, "rms": 2.0, **PASSES})
    return passes * p.rows * p.cols * p.channels * itemsize_bytes(p.dtype)


def gpu_memory_us(p: Norm, gpu: Gpu, cold: Values, stack: Values) -> Values:
    """Time in us of the bytes moved, and of a forward by rows the clocks of its elements."""
    clocks = np.where(is_generated(stack), CLOCKS["generated"], CLOCKS["eager"])
    clocks = np.where(_is(p, "layer", "rms"), clocks, 0.0)
    elements = 1.0 * p.rows * p.cols * p.channels
    return moved_us(traffic_bytes(p), gpu, cold) + computed_us(elements, clocks, gpu)


def features(p: Norm, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes; how many statistics there are, over how many elements; statistics per core."""
    batch = _is(p, *(o for o in FLOPS_PER_ELEMENT if o.startswith("batch")))
    elements = 1.0 * p.rows * p.cols * p.channels
    statistics = np.where(batch, 1.0 * p.channels, 1.0 * p.rows * p.groups)
    waves = statistics / gpu.sm_count
    return {
        "op": p.op,
        "dtype": p.dtype,
        **logs(p, "rows", "cols", "channels", "groups"),
        "log_statistics": np.log2(statistics),
        "log_normalised": np.log2(elements / statistics),
        "log_waves": np.log2(waves),
        "wave_fill": waves / np.ceil(waves),
        "cols_mod_16": p.cols % 16,
    }


def from_layer(call: OpCall) -> Norm:
    """Describe native_layer_norm or rms_norm (x, shape, ...), or a backward (grad, x, ...)."""
    backward = "backward" in call.op
    x, shape = call.args[1:3] if backward else call.args[:2]
    cols = prod(shape)
    op = ("rms" if "rms" in call.op else "layer") + ("_backward" if backward else "")
    return Norm(op=op, rows=max(1, x.numel // cols), cols=cols, dtype=x.dtype)


def from_batch(call: OpCall) -> Norm:
    """Describe native_batch_norm(x, ...) or its backward (grad, x, ...) by the shape of x.

    x has samples, channels and then positions.
    """
    x = call.args[0]
    train_position = {
        "aten._native_batch_norm_legit.no_stats": 3,
        "aten.native_batch_norm_backward.default": 7,
    }
    train = "no_training" not in call.op and bool(call.args[train_position.get(call.op, 5)])
    return Norm(
        op="batch" + ("" if train else "_eval") + ("_backward" if "backward" in call.op else ""),
        rows=x.shape[0],
        cols=max(1, prod(x.shape[2:])),
        channels=x.shape[1],
        dtype=x.dtype,
    )


def from_group(call: OpCall) -> Norm:
    """Describe native_group_norm(x, w, b, N, C, HxW, group) or its backward.

    The backward's arguments are (grad, x, mean, rstd, w, N, ...).
    """
    backward = "backward" in call.op
    rows, channels, cols, groups = call.args[5:9] if backward else call.args[3:7]
    return Norm(
        op="group_backward" if backward else "group",
        rows=rows,
        cols=cols,
        channels=channels,
        groups=groups,
        dtype=call.args[0].dtype,
    )


LAYER = (
    "native_layer_norm",
    "native_layer_norm_backward",
    "rms_norm",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
)
BATCH = (
    "native_batch_norm.default",
    "native_batch_norm_backward.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_no_training.default",
)


def resize(p: Norm, factor: float, first_share: float) -> Norm:
    """Grow layer and RMS norms by rows, then width; batch and group norms by samples, then pixels.

    The first grow factor**(0.5 + first_share / 2) times. Without pixels two samples are left at
    least.
    """
    first_share = 0.5 + first_share / 2
    if p.op.startswith(("layer", "rms")):
        return scale_axes(p, factor, first_share, {"rows": MAX_ROWS, "cols": 16384})
    if p.cols == 1:
        resized = scale_axes(p, factor, 1.0, {"rows": MAX_SIDE})
    else:
        resized = scale_axes(
            p, factor, first_share, {"rows": MAX_BATCH, "cols": MAX_PIXELS_A_SIDE**2}
        )
    return replace(resized, rows=max(2, resized.rows)) if resized.cols == 1 else resized


def fallback(p: Norm, measured: Measured) -> list[Part]:
    """Prices a norm as a copy of the bytes that its passes over the tensor read and write.

    Statistics of a channel or group are summed by one block of threads in NCHW, at BLOCK_RATE at
    most: a pass of n statistics takes bandwidth / (n * rate) as long where they are few. Rows are
    of NCHW and say nothing of NHWC.
    """
    rows_apply = not (p.op.startswith("batch") and measured.channels_last)
    unknown = measured.gpu.kind == "cpu" or p.op not in PASSES
    if unknown or (rows_apply and measured.seen("norm", p.op, p.dtype)):
        return []
    nbytes = float(traffic_bytes(p))
    if p.op in STATISTICS and not measured.channels_last:
        blocks = p.channels if p.op.startswith("batch") else p.rows * p.groups
        slowdown = measured.gpu.hbm_bytes_per_s / (blocks * BLOCK_RATE)
        elements, itemsize = p.rows * p.cols * p.channels, float(itemsize_bytes(p.dtype))
        nbytes += STATISTICS[p.op] * max(0.0, slowdown - 1) * elements * itemsize
    return [memory_copy(nbytes)]


FAMILY = Family(
    name="norm",
    params=Norm,
    sweep=points_of(3, FACTS["sweep"], _norm, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    gpu_memory_us=gpu_memory_us,
    features=features,
    answers={
        **{f"aten.{op}.default": from_layer for op in LAYER},
        **{f"aten.{op}": from_batch for op in BATCH},
        "aten.native_group_norm.default": from_group,
        "aten.native_group_norm_backward.default": from_group,
    },
    fusible=True,
    fallback=fallback,
    weight=1.5,
    gpu_sweep=GpuSweep(
        resize=resize,
        slow_frac=0.2,
        weight=1.5,
    ),
)
