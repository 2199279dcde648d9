"""Convolution in one to three dimensions, plain or transposed, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall
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
    log_uniform,
    torch_dtype,
)
from itercast.microbench.ops.matrix.conv_layers import KINDS
from itercast.microbench.ops.matrix.gemm import TENSOR_CORES, Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import (
    MATMUL_DTYPES,
    MAX_BATCH,
    MAX_PIXELS_A_SIDE,
    MAX_SIDE,
    aligned,
)
from itercast.microbench.slow_imports import torch

MAX_FLOPS = 3e9
MAX_GROUPED_FLOPS = 2e8  # grouped kernels reach a fraction of the peak
MAX_BYTES = 2e8
GROUPED = " in groups"
HALF = ("fp16", "bf16")
TERMS_OF_PASS = assumed(__file__, "terms_of_pass")
CUDNN_DEPTHWISE_TAPS = assumed(__file__, "cudnn_depthwise_taps")
NHWC_GROUPS = assumed(__file__, "nhwc_groups")
NHWC_TERMS_OF_PASS = assumed(__file__, "nhwc_terms_of_pass")
STRIDED_INPUT_GRADIENT: float = assumed(__file__, "strided_input_gradient")
POINTWISE_WEIGHT_GRADIENT: float = assumed(__file__, "pointwise_weight_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv:
    """One call on (batch, in_channels, h, w); in one dimension h = kernel_h = 1, padding_h = 0.

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
    dtype: str = "fp32"


def sweep() -> Iterator[Conv]:
    """Yields points without end: layers of at most 3 GFLOP, grouped ones 0.2."""
    for p in layers(np.random.default_rng(5)):
        limit = MAX_FLOPS if p.groups == 1 else MAX_GROUPED_FLOPS
        if flops(p) <= limit and bytes_moved(p) <= MAX_BYTES:
            yield p


def layers(rng: np.random.Generator) -> Iterator[Conv]:
    """Yields points without end.

    Layers of ResNets, U-Nets, ViT patches, MobileNets, audio and small CNNs.
    """
    while True:
        layer = KINDS[int(rng.integers(len(KINDS)))](rng)
        backward = bool(rng.random() < 0.5)
        first = layer["in_channels"] <= 3  # images need no gradient
        p = Conv(
            op="backward" if backward else "forward",
            batch=log_uniform(rng, 1, 128),
            need_input_grad=not (first and backward),
            **layer,
        )
        if min(out_sizes(p)) >= 1:
            yield p


def build(p: Conv, device: str) -> Workload:
    """Random input and weight; the output gradient has the shape of a real output."""

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch_dtype(p.dtype))

    x = tensor(p.batch, p.in_channels, p.h, p.w)
    ends = (p.in_channels, p.out_channels) if p.transposed else (p.out_channels, p.in_channels)
    weight = tensor(ends[0], ends[1] // p.groups, p.kernel_h, p.kernel_w)
    bias = tensor(p.out_channels) if p.bias else None
    steps = ([p.stride] * 2, [p.padding_h, p.padding_w], [p.dilation] * 2)
    how = (*steps, p.transposed, [0, 0], p.groups)
    if p.op == "forward":
        return Workload(run=lambda: torch.convolution(x, weight, bias, *how), through_aten=False)
    grad = tensor(p.batch, p.out_channels, *(int(s) for s in out_sizes(p)))
    sizes = [p.out_channels] if p.bias else None
    mask = [p.need_input_grad, p.need_weight_grad, p.bias and p.need_weight_grad]
    back = torch.ops.aten.convolution_backward
    return Workload(run=lambda: back(grad, x, weight, sizes, *how, mask))


def out_sizes(p: Conv) -> tuple[Numbers, Numbers]:
    """Height and width of the output; ignores output_padding, less than one stride."""

    def out(size: int, kernel: int, padding: int) -> Numbers:
        reach = p.dilation * (kernel - 1) + 1
        grown = (size - 1) * p.stride - 2 * padding + reach
        return np.where(p.transposed, grown, (size + 2 * padding - reach) // p.stride + 1)

    return out(p.h, p.kernel_h, p.padding_h), out(p.w, p.kernel_w, p.padding_w)


def _passes(p: Conv) -> Numbers:
    """Number of convolutions of the forward's size: 1, or backward one per gradient."""
    grads = np.where(p.need_input_grad, 1.0, 0.0) + np.where(p.need_weight_grad, 1.0, 0.0)
    return np.where(np.equal(p.op, "forward"), 1.0, grads)


def flops(p: Conv) -> Numbers:
    """2 per kernel tap, channel pair of a group and output pixel (transposed: input pixel)."""
    out_h, out_w = out_sizes(p)
    pixels = np.where(p.transposed, 1.0 * p.h * p.w, 1.0 * out_h * out_w)
    taps = 1.0 * p.in_channels * p.out_channels / p.groups * p.kernel_h * p.kernel_w
    return _passes(p) * 2 * p.batch * pixels * taps


def bytes_moved(p: Conv) -> Numbers:
    """Input, weight and output once; a backward reads what each gradient needs and writes it."""
    out_h, out_w = out_sizes(p)
    x = 1.0 * p.batch * p.in_channels * p.h * p.w
    y = 1.0 * p.batch * p.out_channels * out_h * out_w
    w = 1.0 * p.in_channels * p.out_channels / p.groups * p.kernel_h * p.kernel_w
    bias = np.where(p.bias, 1.0, 0.0) * p.out_channels
    want_x, want_w = (np.where(b, 1.0, 0.0) for b in (p.need_input_grad, p.need_weight_grad))
    backward = y + want_x * (w + x) + want_w * (x + w + bias)
    elements = np.where(np.equal(p.op, "forward"), x + w + y + bias, backward)
    return elements * itemsize_bytes(p.dtype)


def features(p: Conv, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes of the equivalent matrix product per group, its tile fill and waves."""
    out_h, out_w = out_sizes(p)
    m, n = 1.0 * p.batch * out_h * out_w, p.out_channels / p.groups
    taps = 1.0 * p.kernel_h * p.kernel_w
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
        "log_pixels": np.log2(1.0 * p.h * p.w),
        "log_taps": np.log2(taps),
        "log_groups": np.log2(p.groups),
        "log_m": np.log2(m),
        "log_depth": np.log2(p.in_channels / p.groups * taps),
        "stride": p.stride,
        "dilation": p.dilation,
        "overlap": np.log2(taps) - 2 * np.log2(p.stride),
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

    A 3-d call is described as a 2-d one on slices, whose channels are those of all slices under the
    kernel. Where strides or dilations differ between the sides of an image, those of the height
    stand for both, on a width that gives as many outputs.
    """
    backward = "backward" in call.op
    x, weight, bias, *options, transposed, _, groups = call.args[backward : backward + 9]
    mask = call.args[10] if backward else (True, True, bias is not None)
    rank = len(x.shape) - 2
    if rank > 3:
        return None
    flat = (0,) * (3 - rank)  # in one dimension there is the width alone
    stride, padding, dilation = (flat + tuple(v) * (rank // len(v)) for v in options)
    sizes, kernel = ((1,) * len(flat) + t.shape[2:] for t in (x, weight))
    first = max(1, 3 - rank)  # the axis that the height's stride and dilation are of

    def outputs(axis: int) -> int:
        """As many as a plain convolution gives; a transposed one multiplies each input."""
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        given = (sizes[axis] + 2 * padding[axis] - reach) // max(1, stride[axis]) + 1
        return int(sizes[axis] if transposed else given)

    width = sizes[2]
    if not transposed and (stride[first], dilation[first]) != (stride[2], dilation[2]):
        reach = dilation[first] * (kernel[2] - 1) + 1
        width = max(1, (outputs(2) - 1) * stride[first] + reach - 2 * padding[2])
    return Conv(
        op="backward" if backward else "forward",
        batch=x.shape[0] * outputs(0),
        in_channels=x.shape[1] * (1 if transposed else kernel[0]),
        out_channels=weight.shape[1] * groups * kernel[0] if transposed else weight.shape[0],
        h=sizes[1],
        w=width,
        kernel_h=kernel[1],
        kernel_w=kernel[2],
        stride=stride[first],
        padding_h=padding[1],
        padding_w=padding[2],
        dilation=dilation[first],
        groups=groups,
        bias=bool(mask[2]),
        transposed=transposed,
        need_input_grad=bool(mask[0]),
        need_weight_grad=bool(mask[1]),
        dtype=x.dtype,
    )


def resize(p: Conv, factor: float, lean: float) -> Conv:
    """Grows the number of images, then their sides, which stay as large as the kernel."""
    batch = min(max(MAX_BATCH, p.batch), max(1, round(p.batch * factor ** (0.5 + lean / 2))))
    left = factor * p.batch / batch
    flat = p.h == p.kernel_h == 1
    limit = MAX_SIDE // 2 if flat else MAX_PIXELS_A_SIDE

    def side(old: int, kernel: int, padding: int) -> int:
        least = max(1, p.dilation * (kernel - 1) + 1 - 2 * padding, padding + 1)
        wanted = aligned(old * left ** (1.0 if flat else 0.5), old)
        return max(least, min(max(limit, old), wanted))

    h = 1 if flat else side(p.h, p.kernel_h, p.padding_h)
    return replace(p, batch=batch, h=h, w=side(p.w, p.kernel_w, p.padding_w))


def op_name(p: Conv) -> Values:
    """The op's name; grouped convolutions are ops of their own, since other kernels run them."""
    return np.where(np.asarray(p.groups, dtype=float) > 1, p.op + GROUPED, p.op)


def fallback(p: Conv, measured: Measured) -> list[Part]:
    """Forwards (``_forwards``) where models saw them; else a matrix product or memory passes.

    The product has the multiplications and bytes of implicit GEMM: taps that read the same pixel
    read it from memory once (arXiv:1410.0759, section 3). In NCHW on tensor cores its tensors are
    transposed to NHWC and back (cuDNN developer guide, "tensor core operations"); where that takes
    longer than CUDA cores in fp32, which read NCHW, TF32 runs as that.
    """
    forward = replace(p, op="forward")
    if measured.gpu.kind == "cpu" or measured.seen("conv", str(op_name(p)), p.dtype):
        return []
    passes = p.need_input_grad + p.need_weight_grad if p.op == "backward" else 1
    forwards = _forwards(p)
    if measured.seen("conv", str(op_name(forward)), p.dtype):
        return [Part(family="conv", params=forward, times=forwards)]
    out_h, out_w = (int(np.maximum(s, 1)) for s in out_sizes(p))
    x, y = p.batch * p.in_channels * p.h * p.w, p.batch * p.out_channels * out_h * out_w
    moved = (x + y) * int(itemsize_bytes(p.dtype))
    pixels, terms = p.batch * out_h * out_w, p.in_channels // p.groups * p.kernel_h * p.kernel_w
    if p.groups > 1:
        return [replace(memory_copy(moved), times=_grouped_passes(p, terms, measured))]
    plain = p.dtype == "tf32" and not (measured.channels_last or p.transposed)
    if plain and _faster_in_fp32(p, moved, measured):
        return [Part(family="conv", params=replace(forward, dtype="fp32"), times=forwards)]
    taps = max(1, pixels * terms // x)  # that read the same pixel
    m, n = max(1, pixels // taps), p.out_channels * taps
    product = Gemm(op="mm", m=m, n=n, k=terms, layout="nt", dtype=p.dtype)
    parts = [Part(family="gemm", params=product, times=forwards)]
    if p.dtype in TENSOR_CORES and not measured.channels_last:
        parts.append(memory_copy(2 * passes * moved))
    return parts


def _forwards(p: Conv) -> float:
    """Time of a call over the time of its forward: 1, or backward the sum over its gradients.

    Each multiplies as often as the forward. The input's takes longer where a stride leaves gaps in
    it (a transposed one has none), the weights' of one tap as its few sums run over all pixels.
    """
    if p.op == "forward":
        return 1.0
    for_input = STRIDED_INPUT_GRADIENT if p.stride > 1 and not p.transposed else 1.0
    for_weight = POINTWISE_WEIGHT_GRADIENT if p.kernel_h * p.kernel_w == 1 else 1.0
    return p.need_input_grad * for_input + p.need_weight_grad * for_weight


def _faster_in_fp32(p: Conv, moved: int, measured: Measured) -> bool:
    """Whether CUDA cores take less time than tensor cores and their two transposes.

    Of one pass that reads and writes ``moved`` bytes, by rooflines: max(flops / rate, bytes /
    bandwidth), with rates as large products achieve them where that is stated.
    """
    gpu, forward = measured.gpu, replace(p, op="forward")
    memory_s = moved / gpu.hbm_bytes_per_s
    tensor_s, cuda_s = (
        max(float(flops(forward)) / gpu.achieved_flops_per_s.get(d, gpu.peak(d)), memory_s)
        for d in ("tf32", "fp32")
    )
    return measured.seen("conv", "forward", "fp32") and cuda_s < tensor_s + 2 * memory_s


def _grouped_passes(p: Conv, terms: int, measured: Measured) -> float:
    """Number of passes of a grouped convolution over its tensors; ``terms`` are summed per output.

    passes = 1 + sqrt(terms / 9) for each of forward, input gradient and weight gradient, but
    - weights of a depthwise one: a pass for every tap, by torch's own kernel, unless cuDNN takes it
      (torch 2.1, Convolution.cpp and DepthwiseConv2d.cu);
    - both gradients of few or wide groups in NHWC: max(passes, terms / 5), as cuDNN is slow there.
    """
    once: float = 1 + (terms / TERMS_OF_PASS) ** 0.5
    width = p.in_channels // p.groups
    if p.op != "backward":
        return once
    for_weight, for_input = once, once
    if p.groups == p.in_channels:
        by_cudnn = p.dtype in HALF and p.stride == 1 and terms <= CUDNN_DEPTHWISE_TAPS
        for_weight = once if by_cudnn or measured.channels_last else terms
    elif measured.channels_last and (p.groups < NHWC_GROUPS or width > NHWC_GROUPS):
        for_weight = for_input = max(once, terms / NHWC_TERMS_OF_PASS)
    return p.need_input_grad * for_input + p.need_weight_grad * for_weight


FAMILY = Family(
    name="conv",
    params=Conv,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={
        "aten.convolution.default": from_call,
        "aten.convolution_backward.default": from_call,
    },
    matmul=True,
    op_name=op_name,
    fallback=fallback,
    weight=2.0,
    gpu_sweep=GpuSweep(
        points=layers,
        dtypes=MATMUL_DTYPES,
        resize=resize,
        slow_frac=0.1,
        compute_bound=True,
        weight=2.0,
    ),
)
