"""Convolution in one to three dimensions, plain or transposed, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Values,
    Workload,
    itemsize_bytes,
)
from itercast.microbench.ops.matrix.conv_rate import most_of_peak, rate
from itercast.microbench.ops.matrix.gemm import TENSOR_CORES, Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy, windowed_copy
from itercast.microbench.ops.sizes import (
    MATMUL_DTYPES,
    MAX_BATCH,
    MAX_PIXELS_A_SIDE,
    MAX_SIDE,
    aligned,
    points_of,
    swept,
)

SWEPT = facts_of(__file__)
MAX_FLOPS = 3e9
MAX_GROUPED_FLOPS = 2e8  # grouped kernels reach a fraction of the peak
MAX_BYTES = 2e8
TERMS_OF_PASS = assumed(__file__, "terms_of_pass")
SLOW_IN_NHWC: Mapping[str, float] = assumed(__file__, "slow_in_nhwc")
GROUPED_SHARE: float = assumed(__file__, "grouped_share")
STRIDED_INPUT_GRADIENT: Mapping[str, float] = assumed(__file__, "strided_input_gradient")
WEIGHT_GRADIENT: Mapping[str, float] = assumed(__file__, "weight_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv:
    """One call on (batch, in_channels, depth, h, w), each side of which may be 1.

    ``need_input_grad`` and ``need_weight_grad`` say what a backward computes.
    """

    op: str
    batch: int
    in_channels: int
    out_channels: int
    h: int
    w: int
    kernel_h: int
    kernel_w: int
    stride: int = 1
    padding_h: int = 0
    padding_w: int = 0
    dilation: int = 1
    groups: int = 1
    bias: bool = False
    transposed: bool = False
    need_input_grad: bool = True
    need_weight_grad: bool = True
    depth: int = 1
    kernel_d: int = 1
    padding_d: int = 0
    dtype: str = "fp32"


def _has_outputs(p: Conv) -> bool:
    return bool(min(out_sizes(p)) >= 1)


def _is_quick(p: Conv) -> bool:
    limit = MAX_FLOPS if p.groups == 1 else MAX_GROUPED_FLOPS
    return _has_outputs(p) and bool(flops(p) <= limit and bytes_moved(p) <= MAX_BYTES)


def _layer(size: int, kernel: int, **fields: Any) -> Conv:
    """A layer from sizes as the YAML file states them."""
    padding = fields.pop("padding", fields.get("dilation", 1) * (kernel // 2))
    if per_in := fields.pop("out_per_in", 0):
        fields["out_channels"] = max(1, int(per_in * fields["in_channels"]))
    if fields.pop("patches", False):
        size, fields["stride"] = size * kernel, kernel
    if fields.pop("depthwise", False):
        fields["groups"] = fields["in_channels"]
    for axis in "w" if "h" in fields else "hw":
        fields |= {axis: size, f"kernel_{axis}": kernel, f"padding_{axis}": padding}
    first = fields["in_channels"] <= 3 and fields["op"] == "backward"  # images need no gradient
    return Conv(**{"kernel_h": 1, **fields}, need_input_grad=not first)


def build(p: Conv, device: str) -> Workload:
    """Random input and weight; the output gradient has the shape of a real output."""

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch_dtype(p.dtype))

    first = 0 if p.depth * p.kernel_d > 1 else 1  # axis; images have height and width alone
    sizes, kernel = (p.depth, p.h, p.w)[first:], (p.kernel_d, p.kernel_h, p.kernel_w)[first:]
    padding, rank = [p.padding_d, p.padding_h, p.padding_w][first:], 3 - first
    x = tensor(p.batch, p.in_channels, *sizes)
    ends = (p.in_channels, p.out_channels) if p.transposed else (p.out_channels, p.in_channels)
    weight = tensor(ends[0], ends[1] // p.groups, *kernel)
    bias = tensor(p.out_channels) if p.bias else None
    steps = ([p.stride] * rank, padding, [p.dilation] * rank)
    options = (*steps, p.transposed, [0] * rank, p.groups)
    if p.op == "forward":
        return Workload(
            run=lambda: torch.convolution(x, weight, bias, *options), through_aten=False
        )
    grad = tensor(p.batch, p.out_channels, *(int(s) for s in out_sizes(p)[first:]))
    biases = [p.out_channels] if p.bias else None
    mask = [p.need_input_grad, p.need_weight_grad, p.bias and p.need_weight_grad]
    backward = torch.ops.aten.convolution_backward
    return Workload(run=lambda: backward(grad, x, weight, biases, *options, mask))


def out_sizes(p: Conv) -> tuple[Numbers, ...]:
    """Depth, height and width of the output; ignores output_padding, less than one stride."""

    def out(size: int, kernel: int, padding: int) -> Numbers:
        reach = p.dilation * (kernel - 1) + 1
        grown = (size - 1) * p.stride - 2 * padding + reach
        return np.where(p.transposed, grown, (size + 2 * padding - reach) // p.stride + 1)

    height, width = (p.h, p.kernel_h, p.padding_h), (p.w, p.kernel_w, p.padding_w)
    return tuple(out(*side) for side in ((p.depth, p.kernel_d, p.padding_d), height, width))


def pixels(p: Conv) -> tuple[Numbers, Numbers]:
    """Pixels of all inputs and of all outputs, of one channel."""
    depth, h, w = out_sizes(p)
    return 1.0 * p.batch * p.depth * p.h * p.w, 1.0 * p.batch * depth * h * w


def taps(p: Conv) -> Numbers:
    """Pixels under the kernel."""
    return 1.0 * p.kernel_d * p.kernel_h * p.kernel_w


def _passes(p: Conv) -> Numbers:
    """Number of convolutions of the forward's size: 1, or backward one per gradient."""
    grads = np.where(p.need_input_grad, 1.0, 0.0) + np.where(p.need_weight_grad, 1.0, 0.0)
    return np.where(np.equal(p.op, "forward"), 1.0, grads)


def flops(p: Conv) -> Numbers:
    """2 per kernel tap, channel pair of a group and output pixel (transposed: input pixel)."""
    x, y = pixels(p)
    pairs = 1.0 * p.in_channels * p.out_channels / p.groups * taps(p)
    return _passes(p) * 2 * np.where(p.transposed, x, y) * pairs


def bytes_moved(p: Conv) -> Numbers:
    """Input, weight and output once; a backward reads what each gradient needs and writes it."""
    x, y = (n * c for n, c in zip(pixels(p), (p.in_channels, p.out_channels), strict=True))
    w = 1.0 * p.in_channels * p.out_channels / p.groups * taps(p)
    bias = np.where(p.bias, 1.0, 0.0) * p.out_channels
    want_x, want_w = (np.where(b, 1.0, 0.0) for b in (p.need_input_grad, p.need_weight_grad))
    backward = y + want_x * (w + x) + want_w * (x + w + bias)
    elements = np.where(np.equal(p.op, "forward"), x + w + y + bias, backward)
    return elements * itemsize_bytes(p.dtype)


def features(p: Conv, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes of the equivalent matrix product per group, its tile fill and waves."""
    m, n = pixels(p)[1], p.out_channels / p.groups
    depth = p.in_channels / p.groups * taps(p)
    tiles = p.groups * np.ceil(m / 128) * np.ceil(n / 128)
    waves = tiles / gpu.sm_count
    return {
        "op": p.op,
        "dtype": p.dtype,
        "transposed": np.where(p.transposed, 1.0, 0.0),
        "input_grad": np.where(p.need_input_grad, 1.0, 0.0),
        "weight_grad": np.where(p.need_weight_grad, 1.0, 0.0),
        "bias": np.where(p.bias, 1.0, 0.0),
        "depthwise": np.where(np.equal(p.groups, p.in_channels) & (p.groups > 1), 1.0, 0.0),
        "one_dim": np.where(np.equal(p.h, 1) & np.equal(p.kernel_h, 1), 1.0, 0.0),
        "log_batch": np.log2(p.batch),
        "log_in": np.log2(p.in_channels),
        "log_out": np.log2(p.out_channels),
        "log_pixels": np.log2(1.0 * p.depth * p.h * p.w),
        "log_taps": np.log2(taps(p)),
        "log_groups": np.log2(p.groups),
        "log_m": np.log2(m),
        "log_depth": np.log2(depth),
        "stride": p.stride,
        "dilation": p.dilation,
        "overlap": np.log2(taps(p)) - 2 * np.log2(p.stride),
        "padded": (p.padding_h + p.padding_w) / (p.h + p.w),
        "log_waves": np.log2(waves),
        "wave_fill": waves / np.ceil(waves),
        "tile_fill": m * n * p.groups / (tiles * 128 * 128),
        "in_mod_16": p.in_channels % 16,
        "out_mod_16": p.out_channels % 16,
        "w_mod_16": p.w % 16,
    }


def from_call(call: OpCall) -> Conv | None:
    """Describe convolution(x, weight, bias, ...) or convolution_backward(grad, x, weight, ...).

    Where strides or dilations differ by axis, those of the height stand for all (in one dimension
    the width's), on sides that give as many outputs.
    """
    backward = "backward" in call.op
    x, weight, bias, *options, transposed, _, groups = call.args[backward : backward + 9]
    needs = call.args[10] if backward else (True, True, bias is not None)
    if (rank := len(x.shape) - 2) > 3:
        return None
    # of each axis; one value stands for all axes
    strides, paddings, dilations = (tuple(v) * (rank // len(v)) for v in options)
    main_axis = -min(2, rank)  # the height, or in one dimension the width
    stride, dilation = strides[main_axis], dilations[main_axis]

    def side(axis: int) -> int:
        """A side that gives as many outputs with the main axis's stride and dilation."""
        size, kernel, padding = x.shape[axis], weight.shape[axis], paddings[axis]
        if transposed or (strides[axis], dilations[axis]) == (stride, dilation):
            return int(size)
        reach = dilations[axis] * (kernel - 1) + 1
        last = (size + 2 * padding - reach) // max(1, strides[axis])
        return int(max(1, last * stride + dilation * (kernel - 1) + 1 - 2 * padding))

    sizes = {"h": 1, "kernel_h": 1, "stride": stride, "dilation": dilation, "groups": groups}
    for axis, name in enumerate(("depth", "h", "w")[3 - rank :], start=-rank):
        sizes |= {name: side(axis), f"kernel_{name[0]}": weight.shape[axis]}
        sizes[f"padding_{name[0]}"] = paddings[axis]
    return Conv(
        op="backward" if backward else "forward",
        batch=x.shape[0],
        in_channels=x.shape[1],
        out_channels=weight.shape[1] * groups if transposed else weight.shape[0],
        **sizes,
        bias=bool(needs[2]),
        transposed=transposed,
        need_input_grad=bool(needs[0]),
        need_weight_grad=bool(needs[1]),
        dtype=x.dtype,
    )


def resize(p: Conv, factor: float, first_share: float) -> Conv:
    """Grows the number of images, then their sides, which stay as large as the kernel."""
    batch = min(max(MAX_BATCH, p.batch), max(1, round(p.batch * factor ** (0.5 + first_share / 2))))
    side_factor = factor * p.batch / batch
    flat = p.h == p.kernel_h == 1
    limit = MAX_SIDE // 2 if flat else MAX_PIXELS_A_SIDE

    def side(old: int, kernel: int, padding: int) -> int:
        least = max(1, p.dilation * (kernel - 1) + 1 - 2 * padding, padding + 1)
        wanted = aligned(old * side_factor ** (1.0 if flat else 0.5), old)
        return max(least, min(max(limit, old), wanted))

    h = 1 if flat else side(p.h, p.kernel_h, p.padding_h)
    return replace(p, batch=batch, h=h, w=side(p.w, p.kernel_w, p.padding_w))


def op_name(p: Conv) -> Values:
    """The op's name; grouped, transposed and volume convolutions run other kernels: other names."""
    name = np.asarray(p.op, dtype=str)
    kinds = {" in groups": 1.0 * p.groups > 1, " transposed": p.transposed}
    kinds[" of volumes"] = 1.0 * p.depth * p.kernel_d > 1
    for kind, applies in kinds.items():
        name = np.char.add(name, np.where(applies, kind, ""))
    return name


def fallback(p: Conv, measured: Measured) -> list[Part]:
    """Prices a convolution without rows by its forward, if that has rows, else by its work.

    A matrix product has the multiplications and bytes of implicit GEMM: taps that read the same
    pixel read it from memory once (arXiv:1410.0759, section 3). In NCHW on tensor cores tensors are
    transposed to NHWC and back (cuDNN developer guide, "tensor core operations"). Rows are measured
    in NCHW: on tensor cores, which run no depthwise convolution in TF32, they say nothing about
    NHWC.
    """
    forward = replace(p, op="forward")
    in_fp32 = p.dtype == "tf32" and p.in_channels == p.groups  # as tensor cores run no depthwise
    on_tensor_cores = p.dtype in TENSOR_CORES and measured.gpu.vendor == "nvidia" and not in_fp32
    usable = not (on_tensor_cores and measured.channels_last)
    if measured.gpu.kind == "cpu" or (usable and measured.seen("conv", str(op_name(p)), p.dtype)):
        return []
    times = _over_forward(p, measured.channels_last)
    if usable and measured.seen("conv", str(op_name(forward)), p.dtype):
        return [Part(family="conv", params=forward, times=times)]
    if p.groups > 1:
        return _grouped(p, measured)
    x, y = (int(np.maximum(n, 1)) for n in pixels(p))
    in_nchw = p.dtype in TENSOR_CORES and not measured.channels_last
    taps_per_pixel = max(1, y * int(taps(p)) // x)  # taps that read the same pixel
    m, n, k = (
        max(1, y // taps_per_pixel),
        p.out_channels * taps_per_pixel,
        p.in_channels * int(taps(p)),
    )
    product = Gemm(op="mm", m=m, n=n, k=k, layout="nt", dtype=p.dtype)
    parts = [Part(family="gemm", params=product, times=times)]
    return [*parts, memory_copy(2 * int(_passes(p)) * _moved(p))] if in_nchw else parts


def _moved(p: Conv) -> int:
    """Bytes of input and output."""
    x, y = pixels(p)
    return int((x * p.in_channels + y * p.out_channels) * itemsize_bytes(p.dtype))


def _over_forward(p: Conv, channels_last: bool) -> float:
    """Time of a call over that of its forward: 1, or the sum over the gradients it computes.

    The input's gradient takes longer where a stride leaves gaps in it (transposed convolutions have
    none). The weights' gradient takes longer as its few sums run over all pixels; in NCHW the more
    so, the fewer terms an output of the forward sums.
    """
    if p.op == "forward":
        return 1.0
    terms = p.in_channels / p.groups * float(taps(p))

    def longer(law: Mapping[str, float]) -> float:
        if channels_last:
            return law["nhwc"]
        return float(np.clip((law["terms"] / terms) ** law["power"], law["least"], law["most"]))

    for_input = longer(STRIDED_INPUT_GRADIENT) if p.stride > 1 and not p.transposed else 1.0
    for_weight = longer(WEIGHT_GRADIENT) if taps(p) == 1 or not channels_last else 1.0
    return p.need_input_grad * for_input + p.need_weight_grad * for_weight


def _grouped(p: Conv, measured: Measured) -> list[Part]:
    """Passes of a grouped convolution over its tensors; ``terms`` are summed per output.

    Depthwise ones in fp32 run in torch's own kernels, a thread per output. Others take 1 +
    sqrt(terms / 9) passes, or as long as FLOP at GROUPED_SHARE of the peak; both gradients of few
    or wide groups in NHWC max(passes, terms / 5), as cuDNN is slow there.
    """
    group_width, moved, gpu = p.in_channels // p.groups, _moved(p), measured.gpu
    if group_width == 1 and p.dtype == "fp32":
        outputs = float(pixels(p)[1]) * p.out_channels
        copy = windowed_copy(outputs, float(taps(p)), moved, gpu)
        return [replace(copy, times=copy.times * _over_forward(p, measured.channels_last))]
    terms = group_width * float(taps(p))
    compute_s = float(flops(replace(p, op="forward"))) / (GROUPED_SHARE * gpu.peak(p.dtype))
    passes = max(1 + (terms / TERMS_OF_PASS) ** 0.5, compute_s * gpu.hbm_bytes_per_s / moved)
    few = p.groups < SLOW_IN_NHWC["groups"] or group_width > SLOW_IN_NHWC["groups"]
    if p.op == "backward" and measured.channels_last and group_width > 1 and few:
        passes = max(passes, terms / SLOW_IN_NHWC["terms_of_pass"])
    return [replace(memory_copy(moved), times=passes * _over_forward(p, measured.channels_last))]


FAMILY = Family(
    name="conv",
    params=Conv,
    sweep=points_of(5, SWEPT, _layer, _is_quick),
    build=build,
    flops=flops,
    least_flops=lambda p, gpu, rate: flops(p) / most_of_peak(p, gpu, rate),
    bytes_moved=bytes_moved,
    features=features,
    answers={f"aten.{op}.default": from_call for op in ("convolution", "convolution_backward")},
    matmul=True,
    without_tf32=("amd",),  # torch's miopen_convolution (native_functions.yaml) has no allow_tf32
    rate=rate,
    op_name=op_name,
    fallback=fallback,
    weight=3.0,
    gpu_sweep=GpuSweep(
        points=partial(swept, stated=SWEPT, make=_layer, fits=_has_outputs),
        dtypes=MATMUL_DTYPES,
        resize=resize,
        slow_frac=0.1,
        compute_bound=True,
        weight=2.0,
    ),
)
