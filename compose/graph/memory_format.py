"""Images in NHWC instead of NCHW: what ``channels_last`` changes of a captured step.

A group norm's kernels read and write NCHW, so that images are turned before and after it: such a
step gains nothing. Source: aten/src/ATen/native/group_norm.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from microbench.opcall import OpCall, StepCapture, TensorSpec

OPS = ("convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward")
GROUP_NORM = "aten.native_group_norm.default"
IMAGES = tuple(f"aten.{op}.default" for op in OPS)


def with_memory_format(capture: StepCapture, stated: str) -> StepCapture:
    """The step with what convolutions and batch norms read in NHWC where ``stated`` is nhwc."""
    if stated != "nhwc" or any(c.op == GROUP_NORM for c in capture.calls):
        return capture
    calls = tuple(_turned(c) if c.op in IMAGES else c for c in capture.calls)
    return replace(capture, calls=calls)


def _turned(call: OpCall) -> OpCall:
    return replace(call, args=tuple(_nhwc(v) for v in call.args))


def _nhwc(value: Any) -> Any:
    if not isinstance(value, TensorSpec) or len(value.shape) != 4:
        return value
    channels, width = value.shape[1], value.shape[3]
    return replace(value, stride=(prod(value.shape[1:]), 1, width * channels, channels))
