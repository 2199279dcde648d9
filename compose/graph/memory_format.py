"""Turns the images of a captured step from NCHW to NHWC, as ``channels_last`` does.

Steps with a group norm are left as they are: its kernels read and write NCHW, so that images are
copied before and after it and nothing is gained. Source: aten/src/ATen/native/group_norm.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from itercast.microbench.opcall import Argument, OpCall, StepCapture, TensorSpec

GROUP_NORM = "aten.native_group_norm.default"
NHWC_OPS = tuple(
    f"aten.{name}.default"
    for name in (
        "convolution",
        "convolution_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
    )
)


def with_memory_format(capture: StepCapture, stated: str) -> StepCapture:
    """Gives the inputs of convolutions and batch norms NHWC strides where ``stated`` is "nhwc"."""
    if stated != "nhwc" or any(c.op == GROUP_NORM for c in capture.calls):
        return capture
    calls = tuple(_call_in_nhwc(c) if c.op in NHWC_OPS else c for c in capture.calls)
    return replace(capture, calls=calls)


def _call_in_nhwc(call: OpCall) -> OpCall:
    return replace(call, args=tuple(_in_nhwc(v) for v in call.args))


def _in_nhwc(value: Argument) -> Argument:
    """A 4-dimensional tensor (N, C, H, W) with the strides of NHWC; anything else unchanged."""
    if not isinstance(value, TensorSpec) or len(value.shape) != 4:
        return value
    channels, width = value.shape[1], value.shape[3]
    return replace(value, stride=(prod(value.shape[1:]), 1, width * channels, channels))
