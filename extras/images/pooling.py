"""Pooling and resampling of images, both directions; volumes count as images of all their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import Args, Argument, OpCall, TensorSpec, torch_dtype
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
    is_any,
    itemsize_bytes,
)
from itercast.microbench.ops.memory.elementwise import windowed_copy
from itercast.microbench.ops.sizes import MAX_BATCH, points_of, resize_along

WINDOWED = ("max_pool2d_with_indices", "avg_pool2d")
ADAPTIVE = ("_adaptive_avg_pool2d", "adaptive_max_pool2d")
RESIZED = ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
FORWARD = WINDOWED + ADAPTIVE + RESIZED
FACTS = facts_of(__file__)
CALLS = FACTS["calls"]
INDEXED = ("max_pool2d_with_indices", "adaptive_max_pool2d")
DILATED = ("max_pool2d_with_indices",)
DILATION_AT = 4  # x, kernel, stride, padding, dilation; or after a gradient
SAME_AS = {"_upsample_nearest_exact2d": "upsample_nearest2d"}
IN_2D = {"upsample_trilinear3d": "upsample_bilinear2d"}
IN_2D |= {o.replace("2d", "3d"): o for o in (*WINDOWED, *ADAPTIVE, "upsample_nearest2d")}
MAX_ELEMENTS = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """``planes`` images (batch x channels) of h x w to out_h x out_w, also in a backward.

    Where the op has no window (adaptive, resized) kernel and stride are 1 and padding 0.
    """

    op: str
    batch: int
    channels: int
    h: int
    w: int
    out_h: int
    out_w: int
    kernel_h: int = 1
    kernel_w: int = 1
    stride_h: int = 1
    stride_w: int = 1
    padding_h: int = 0
    padding_w: int = 0
    dilation: int = 1
    channels_last: bool = False
    dtype: str = "fp32"


def _resized(op: str, h: int, w: int = 0, **fields: Any) -> Pooling:
    """A point from sizes as the YAML file states them."""
    sizes = {name: fields.pop(name) for name in ("batch", "channels", "channels_last")}
    sides = [h, w or h]
    if "kernel" in fields:
        kernel, stride = fields["kernel"], fields["stride"]
        padding, axes = fields["padded"] * (kernel // 2), "hw" if h > 1 else "w"
        sides = [max(side, kernel) if side > 1 else side for side in sides]
        outs = [(side + 2 * padding - kernel) // stride + 1 if side > 1 else 1 for side in sides]
        window = {"kernel": kernel, "stride": stride, "padding": padding}
        sizes |= {f"{name}_{axis}": n for name, n in window.items() for axis in axes}
    elif "out" in fields:
        outs = [min(fields["out"], side) for side in sides]
    else:
        outs = [max(1, int(side * fields["scale"])) for side in sides]
    return Pooling(op=op, h=sides[0], w=sides[1], out_h=outs[0], out_w=outs[1], **sizes)


def _fits(p: Pooling) -> bool:
    """Whether a point is small enough; channels-last points must differ from contiguous ones."""
    pixels = sorted((p.h * p.w, p.out_h * p.out_w))
    if p.channels_last and (p.channels == 1 or pixels[0] == 1):
        return False
    return bool(p.batch * p.channels * pixels[1] <= MAX_ELEMENTS and flops(p) <= 1e8)


def build(p: Pooling, device: str) -> Workload:
    """Random images; a backward gets the results of its forward."""
    layout = torch.channels_last if p.channels_last else torch.contiguous_format

    def image(h: int, w: int) -> Tensor:
        values = torch.randn(p.batch, p.channels, h, w, device=device).to(torch_dtype(p.dtype))
        return values.to(memory_format=layout)

    base = p.op.removesuffix("_backward")
    sides = ("kernel", "stride", "padding")
    pairs = {name: [getattr(p, f"{name}_{axis}") for axis in "hw"] for name in sides}
    operands: dict[str, object] = {
        "x": image(p.h, p.w),
        "gradient": image(p.out_h, p.out_w),
        **pairs,
        "dilation": [p.dilation] * 2,
        "out": [p.out_h, p.out_w],
        "size": [p.batch, p.channels, p.h, p.w],
        "winners": lambda: call_of(base, CALLS[base], operands)()[1],
    }
    return Workload(run=call_of(p.op, CALLS[p.op], operands))


def _is(p: Pooling, ops: tuple[str, ...]) -> Values:
    return is_any(p.op, (*ops, *(f"{op}_backward" for op in ops)))


def taps(p: Pooling) -> Numbers:
    """Input pixels behind an output pixel; a resized one costs 1, 4 or 16 multiply-adds.

    A window larger than the image is cut to it.
    """
    adaptive = np.ceil(p.h / p.out_h) * np.ceil(p.w / p.out_w)
    window = 1.0 * np.minimum(p.kernel_h, p.h) * np.minimum(p.kernel_w, p.w)
    found = np.where(_is(p, ADAPTIVE), adaptive, window)
    found = np.where(_is(p, ("upsample_bilinear2d",)), 2 * 4.0, found)
    return np.where(_is(p, ("upsample_bicubic2d",)), 2 * 16.0, found)


def flops(p: Pooling) -> Numbers:
    """A comparison or addition per output pixel and tap; a winner's gradient is one addition."""
    chosen = _is(p, INDEXED) & np.char.endswith(np.asarray(p.op, dtype=str), "backward")
    return np.where(chosen, 1.0, taps(p)) * p.batch * p.channels * p.out_h * p.out_w


def bytes_moved(p: Pooling) -> Numbers:
    """One side read, the other written once; int64 indices of maxima if there are any."""
    planes = 1.0 * p.batch * p.channels
    pixels = 1.0 * p.h * p.w + p.out_h * p.out_w
    winners = np.where(_is(p, INDEXED), 8.0, 0.0) * p.out_h * p.out_w
    return planes * (pixels * itemsize_bytes(p.dtype) + winners)


def features(p: Pooling, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, taps, overlap of windows, scale."""
    planes = 1.0 * p.batch * p.channels
    return {
        "op": p.op,
        "dtype": p.dtype,
        "channels_last": 1.0 * p.channels_last,
        "log_batch": np.log2(p.batch),
        "log_channels": np.log2(p.channels),
        "log_pixels": np.log2(1.0 * p.h * p.w),
        "log_out_pixels": np.log2(1.0 * p.out_h * p.out_w),
        "log_width": np.log2(p.w),
        "log_out_width": np.log2(p.out_w),
        "log_taps": np.log2(taps(p)),
        "log_overlap": np.log2(1.0 * p.kernel_h * p.kernel_w / (p.stride_h * p.stride_w)),
        "padded": 1.0 * (np.asarray(p.padding_h) + p.padding_w > 0),
        "log_scale": np.log2(1.0 * p.out_h * p.out_w / (p.h * p.w)),
        "log_planes_per_core": np.log2(planes / gpu.sm_count),
        "log_outputs_per_core": np.log2(planes * p.out_h * p.out_w / gpu.sm_count),
    }


def _pair(values: Argument, default: tuple[int, int]) -> tuple[int, int]:
    if not values:
        return default
    return (int(values[0]), int(values[-1]))


def from_call(call: OpCall) -> Pooling | None:
    """Describe a pooling call (x, ...), a backward (grad, x, ...), or resizing and its backward.

    Calls whose result is not known and windows dilated differently by axis are not described.
    """
    op = call.op.split(".")[1]
    base = op.removesuffix("_backward")
    backward, resized = op != base, base in (*RESIZED, *SAME_AS)
    large: TensorSpec = call.args[1] if backward and not resized else call.args[0]
    if not backward and not call.outputs:
        return None
    x_shape = call.args[2] if backward and resized else large.shape
    out_shape = call.args[0].shape if backward else call.outputs[0].shape
    window = _window(base, call.args[2 if backward else 1 :]) if base in WINDOWED else {}
    if window is None or min(*x_shape, *out_shape) < 1:
        return None
    batch, channels, h, w = (1, *x_shape) if len(x_shape) == 3 else x_shape
    return Pooling(
        op=SAME_AS.get(base, base) + ("_backward" if backward else ""),
        batch=batch,
        channels=channels,
        h=h,
        w=w,
        out_h=out_shape[-2],
        out_w=out_shape[-1],
        channels_last=_channels_last(large),
        dtype=large.dtype,
        **window,
    )


def from_volume(call: OpCall) -> Pooling | None:
    """Describe a 3-d pooling call as a 2-d one that has depth * h rows.

    Sizes, windows, strides and paddings change alike: (depth, h, w) becomes (depth * h, w). Both
    axes have the width's dilation.
    """
    _, op, overload = call.op.split(".")
    base = op.removesuffix("_backward")
    args, at = [_flat(value) for value in call.args], DILATION_AT + (op != base)
    if IN_2D[base] in DILATED and args[at : at + 1]:
        args[at] = call.args[at][-1:]
    flat = replace(
        call,
        op=f"aten.{IN_2D[base]}{op.removeprefix(base)}.{overload}",
        args=tuple(args),
        outputs=tuple(map(_flat, call.outputs)),
    )
    return from_call(flat)


def _flat(value: Argument) -> Argument:
    """Replace (..., depth, h, w) by (..., depth * h, w), in a tuple or a tensor's shape.

    A tuple of one number stands for three equal ones; anything else stays as it is.
    """
    if isinstance(value, TensorSpec):
        return replace(value, shape=_flat(value.shape), stride=())
    if not isinstance(value, tuple) or not value:
        return value
    *before, depth, h, w = value * 3 if len(value) == 1 else value
    return (*before, depth * h, w)


def _window(base: str, given: Args) -> dict[str, int] | None:
    """kernel, stride (the kernel where empty), padding[, dilation]; None: dilated by axis.

    The dilation of an axis on which the window has one pixel does not count.
    """
    found = [*given[:4], *[()] * (4 - len(given[:4]))]
    kernel = _pair(found[0], (1, 1))
    stride, padding = _pair(found[1], kernel), _pair(found[2], (0, 0))
    spaced = _pair(found[3], (1, 1)) if base in DILATED else (1, 1)
    wide = {d for d, pixels in zip(spaced, kernel, strict=True) if pixels > 1}
    if len(wide) > 1:
        return None
    pairs = {"kernel": kernel, "stride": stride, "padding": padding}
    sides = {f"{name}_{axis}": v[i] for name, v in pairs.items() for i, axis in enumerate("hw")}
    return sides | {"dilation": next(iter(wide), 1)}


def _channels_last(t: TensorSpec) -> bool:
    """Whether channels are the fastest axis of a (batch, channels, h, w) tensor."""
    return not t.contiguous and len(t.stride) == 4 and t.stride[1] == 1 and t.shape[1] > 1


def fallback(p: Pooling, measured: Measured) -> list[Part]:
    """A window for each output; backward is left to its bytes."""
    backward = p.op.endswith("backward")
    if backward or measured.gpu.kind == "cpu" or measured.seen("pooling", p.op, p.dtype):
        return []
    outputs = 1.0 * p.batch * p.channels * p.out_h * p.out_w
    return [windowed_copy(outputs, float(taps(p)), float(bytes_moved(p)), measured.gpu)]


NAMES = (*FORWARD, *SAME_AS)
FAMILY = Family(
    name="pooling",
    params=Pooling,
    sweep=points_of(12, FACTS["sweep"], _resized, _fits),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    fallback=fallback,
    answers={
        **{f"aten.{n}{end}.default": from_call for n in NAMES for end in ("", "_backward")},
        **{f"aten.{n}{end}.default": from_volume for n in IN_2D for end in ("", "_backward")},
    },
    gpu_sweep=GpuSweep(
        resize=resize_along({"batch": MAX_BATCH, "channels": 2048}),
    ),
)
