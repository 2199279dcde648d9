"""What stands in on a GPU for ops that no model has seen: other ops, which models have.

A convolution backward is as many forwards as gradients it makes; in a dtype never seen it is a
product of as many multiplications and bytes (implicit GEMM: taps that read the same pixel read it
from memory once), in half precision and TF32 with its tensors turned from NCHW to NHWC and back by
each of these, as tensor cores want them. A grouped one passes over its tensors once and, as timm's
table of ResNeXts and MobileNets on an RTX 3090 tells, as often again as the root of its sums' terms
over nine. Backward, torch's own kernel of a depthwise one reads both tensors for every tap of the
weights; up to 5 x 5 at stride one in half precision are cuDNN's. In NHWC cuDNN is slow backward
where groups are few or wide: a pass for every five terms, by the same table. Norms never seen, and
ops without a model, are copies of the bytes they move: utilisation as measured, not the peak. A
softmax backward is its model's answer, which knows forwards, and the product of gradient and output
that torch makes beforehand. AIConfigurator measured products in fp8 with the cast of their first
factor, which steps do once for several: where its rows answer, such a product takes what it does
beyond one of few columns, and the time to read that factor; experts' are one of all tokens. In bf16
and on GPUs from Hopper on experts' products are one kernel, elsewhere one after the other. An LSTM
layer never seen is a product of all its inputs, one of the state at each step, and a pass over the
gates at each; backward as many again, and products for the weights' gradients.
Sources: cuDNN developer guide, "tensor core operations"; arXiv:1410.0759, section 3; torch 2.1,
SoftMax.cu, layer_norm_kernel.cu, DepthwiseConv2d.cu and Convolution.cpp; torch 2.11,
cuda/GroupedBlas.cpp; github.com/pytorch/pytorch/issues/34977.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from learners.family_model import FamilyModel
from learners.features.op_aliases import GROUPED
from learners.transfer.source_gpus import software
from microbench.hardware.spec import Gpu
from microbench.ops.family import itemsize_bytes
from microbench.ops.matrix.conv import Conv, out_sizes
from microbench.ops.matrix.gemm import FAMILY as GEMM
from microbench.ops.matrix.gemm import TENSOR_CORES, Gemm
from microbench.ops.matrix.recurrent import GATES, Recurrent
from microbench.ops.memory.elementwise import Elementwise
from microbench.ops.memory.norm import Norm
from microbench.ops.memory.reduction import Reduction

TORCH = "torch"  # the software that forecasts are of: the newest torch that rows are of
NEEDED = ("gemm", "elementwise")
HALF = ("fp16", "bf16")
PASSES = {
    **{"batch": 3, "batch_backward": 5, "batch_eval": 2, "batch_eval_backward": 3},
    **{"group": 3, "group_backward": 5},  # statistics need a pass of their own
    **{"layer_backward": 5, "rms_backward": 5},  # so do the weights' gradients
}
DEPTHWISE = 9  # terms of a sum in a 3 x 3 depthwise convolution
TAPS = 25  # of a depthwise convolution that torch leaves to cuDNN, at most
GROUPS, REUSED = 32, 5  # groups at least and channels of one at most; terms to a pass otherwise
NARROW, WIDE = 32, 512  # columns of a product in fp8 that is a cast next to nothing, or more
GROUPING = ("hopper", "blackwell", "blackwell-ultra")
SOFTMAX_BACKWARD = "_softmax_backward_data"
SERVING = ("sglang", "trtllm", "vllm")  # software that AIConfigurator measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An op that is priced in place of another, ``times`` times."""

    family: str
    params: Any
    times: float = 1.0


def stand_ins(
    params: Any, models: Mapping[str, Any], channels_last: bool, gpu: Gpu, stack: str = TORCH
) -> list[Part]:
    """Parts that stand in for an op; none where its family's rows tell of it on this GPU.

    ``stack`` is the software that is forecast.
    """
    if isinstance(params, Gemm) and params.op == "grouped_mm":
        return list(_grouped(params, models, gpu))
    if not all(learned(models, name) for name in NEEDED):
        return []
    if isinstance(params, Recurrent):
        told = _told(models, "recurrent", gpu, params.op, params.dtype)
        return [] if told else list(_recurrent(params))
    if gpu.kind == "cpu":
        return []
    if isinstance(params, Conv):
        return list(_conv(params, models, channels_last, gpu))
    if isinstance(params, Gemm):
        return list(_without_cast(params, models["gemm"], gpu, stack))
    if isinstance(params, Reduction) and params.op == SOFTMAX_BACKWARD:
        return list(_softmax_backward(params, models, gpu))
    if not isinstance(params, Norm) or params.op not in PASSES:
        return []
    if not _told(models, "norm", gpu, params.op, params.dtype):
        elements = params.rows * params.cols * params.channels
        return [copy(PASSES[params.op] * elements * int(itemsize_bytes(params.dtype)))]
    return []


def copy(nbytes: float) -> Part:
    """A pass over memory that reads and writes ``nbytes`` in all."""
    numel = max(1, round(nbytes / 8))
    point = Elementwise(op="mul", numel=numel, inner=numel, tensors=1, form="scalar")
    return Part(family="elementwise", params=point)


def learned(models: Mapping[str, Any], family: str) -> bool:
    """Whether a family has a model that was learned from rows."""
    return isinstance(models.get(family), FamilyModel)


def _told(models: Mapping[str, Any], family: str, gpu: Gpu, op: str, dtype: str) -> bool:
    """Whether there is a model whose rows tell of this op in this dtype on this GPU."""
    return learned(models, family) and bool(models[family].tells(gpu, op, dtype))


def _softmax_backward(p: Reduction, models: Mapping[str, Any], gpu: Gpu) -> Iterator[Part]:
    if not learned(models, "reduction") or _told(models, "reduction", gpu, p.op, p.dtype):
        return
    numel = p.outer * p.size * p.inner
    product = Elementwise(op="mul", numel=numel, inner=numel, tensors=2, dtype=p.dtype)
    yield Part(family="reduction", params=p)
    yield Part(family="elementwise", params=product)


def _grouped(p: Gemm, models: Mapping[str, Any], gpu: Gpu) -> Iterator[Part]:
    """One by one where no kernel takes all experts; else as the products most alike.

    That is the GPU's doing: what others measured is not lent.
    """
    at_once = p.dtype == "bf16" and gpu.architecture in GROUPING
    if learned(models, "gemm") and not at_once and not models["gemm"].has(gpu, p.op, p.dtype):
        yield Part(family="gemm", params=replace(p, op="mm", batch=1), times=p.batch)


def _without_cast(p: Gemm, model: FamilyModel, gpu: Gpu, stack: str) -> Iterator[Part]:
    if p.op != "scaled_mm" or p.n < WIDE:
        return
    shares = model.stack_shares(gpu, p.op, p.dtype, stack, GEMM)
    casts = sum(share for name, share in shares.items() if software(name) in SERVING)
    whole = replace(p, m=p.m * p.batch, batch=1)
    if casts or p.batch > 1:
        yield Part(family="gemm", params=whole)
    if casts:
        yield Part(family="gemm", params=replace(whole, n=NARROW), times=-casts)
        yield replace(copy(whole.m * whole.k), times=casts)


def _recurrent(p: Recurrent) -> Iterator[Part]:
    cells, wide = p.steps * p.batch, GATES * p.hidden
    gates = copy(2 * p.batch * wide * int(itemsize_bytes(p.dtype)))

    def product(m: int, n: int, k: int, times: int = 1) -> Part:
        params = Gemm(op="mm", m=m, n=n, k=k, layout="nt", dtype=p.dtype)
        return Part(family="gemm", params=params, times=times)

    yield replace(gates, times=p.steps)
    if p.op == "lstm":
        yield product(cells, wide, p.inputs)
        yield product(p.batch, wide, p.hidden, p.steps)
        return
    yield product(cells, p.inputs, wide)
    yield product(p.batch, p.hidden, wide, p.steps)
    yield product(wide, p.inputs, cells)
    yield product(wide, p.hidden, cells)


def _conv(p: Conv, models: Mapping[str, Any], channels_last: bool, gpu: Gpu) -> Iterator[Part]:
    groups = GROUPED if p.groups > 1 else ""
    if _told(models, "conv", gpu, p.op + groups, p.dtype):
        return
    back = p.op == "backward"
    passes = p.need_input_grad + p.need_weight_grad if back else 1
    if _told(models, "conv", gpu, "forward" + groups, p.dtype):
        yield Part(family="conv", params=replace(p, op="forward"), times=passes)
        return
    out_h, out_w = (int(np.maximum(s, 1)) for s in out_sizes(p))
    x, y = p.batch * p.in_channels * p.h * p.w, p.batch * p.out_channels * out_h * out_w
    item = int(itemsize_bytes(p.dtype))
    m, k = p.batch * out_h * out_w, p.in_channels // p.groups * p.kernel_h * p.kernel_w
    if p.groups > 1:
        yield replace(copy((x + y) * item), times=_passes(p, k, channels_last))
        return
    wide = max(1, m * k // x)  # taps that read the same pixel
    product = Gemm(
        op="mm",
        m=max(1, m // wide),
        n=p.out_channels * wide,
        k=k,
        layout="nt",
        dtype=p.dtype,
    )
    yield Part(family="gemm", params=product, times=passes)
    if p.dtype in TENSOR_CORES and not channels_last:
        yield copy(2 * passes * (x + y) * item)


def _passes(p: Conv, terms: int, channels_last: bool) -> float:
    """How often a grouped convolution passes over its tensors, for sums of so many terms."""
    once: float = 1 + (terms / DEPTHWISE) ** 0.5
    if p.op != "backward":
        return once
    by_tap, each = once, once
    if p.groups < p.in_channels:
        many = p.groups >= GROUPS and p.in_channels // p.groups <= GROUPS
        by_tap = each = once if many or not channels_last else max(once, terms / REUSED)
    elif not channels_last and (p.dtype not in HALF or p.stride > 1 or terms > TAPS):
        by_tap = terms
    return p.need_input_grad * each + p.need_weight_grad * by_tap
