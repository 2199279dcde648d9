"""Attention, convolution, normalisation and reductions: counts by hand, calls as captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from op_calls import TOY, logged, spec
from torch import nn

from itercast.microbench.opcall import OpCall
from itercast.microbench.ops.matrix import attention, conv
from itercast.microbench.ops.memory import norm, reduction

ATTENTION = attention.Attention(
    op="forward", batch=2, heads=4, kv_heads=2, q_len=3, kv_len=6, head_dim=8, causal=False
)


def test_attention_by_hand() -> None:
    one = 2 * 2 * 4 * 3 * 6 * 8  # 2 b h q k d
    assert attention.flops(ATTENTION) == 2 * one
    assert attention.flops(replace(ATTENTION, op="backward")) == 5 * one
    assert attention.flops(replace(ATTENTION, causal=True)) == one / 2  # 0.5 * 3/6 of two products
    # Q and O: 2*4*3*8 elements each; K and V: 2*2*6*8 each
    assert attention.bytes_moved(ATTENTION) == (2 * 192 + 2 * 192) * 4
    masked = replace(ATTENTION, masked=True)
    assert attention.bytes_moved(masked) == 768 * 4 + 2 * 3 * 6


def test_attention_reads_captured_calls() -> None:
    q, k = spec(2, 4, 3, 8), spec(2, 2, 6, 8)
    facts = {"is_causal": False, "dropout_p": 0.1, "enable_gqa": True, "masked": True}
    call = OpCall(op="itercast.sdpa_backward", args=(q, q, k, k), kwargs=facts)
    expected = replace(ATTENTION, op="backward", masked=True, dropout=True)
    assert attention.from_call(call) == expected
    call = OpCall(op="itercast.sdpa", args=(spec(5, 3, 8),) * 3)
    headless = attention.from_call(call)
    assert headless is not None
    assert (headless.batch, headless.heads, headless.q_len) == (5, 1, 3)


CONV = conv.Conv(
    op="forward",
    batch=2,
    in_channels=4,
    out_channels=6,
    h=5,
    w=7,
    kernel_h=3,
    kernel_w=3,
    stride=2,
    padding_h=1,
    padding_w=1,
    groups=2,
    bias=True,
)


def test_convolution_by_hand() -> None:
    """5x7 to 3x4; each output sums 2 channels * 9 taps."""
    assert conv.flops(CONV) == 2 * 2 * 6 * (3 * 4) * (2 * 9)
    x, w, y = 2 * 4 * 5 * 7, 6 * 2 * 9, 2 * 6 * 3 * 4
    assert conv.bytes_moved(CONV) == (x + w + y + 6) * 4
    both = replace(CONV, op="backward")
    assert conv.flops(both) == 2 * conv.flops(CONV)
    assert conv.bytes_moved(both) == (y + (w + x) + (x + w + 6)) * 4
    first = replace(both, need_input_grad=False)
    assert conv.flops(first) == conv.flops(CONV)
    assert conv.bytes_moved(first) == (y + x + w + 6) * 4


def test_a_transposed_convolution_counts_input_pixels() -> None:
    up = conv.Conv(
        op="forward",
        batch=1,
        in_channels=4,
        out_channels=2,
        h=3,
        w=3,
        kernel_h=2,
        kernel_w=2,
        stride=2,
        transposed=True,
    )
    assert conv.flops(up) == 2 * 9 * 4 * 2 * 4
    assert conv.bytes_moved(up) == (4 * 9 + 4 * 2 * 4 + 2 * 36) * 4  # 3x3 to 6x6


def test_one_dimensional_calls_are_rows_and_odd_ones_are_declined() -> None:
    args: tuple[Any, ...] = (
        spec(2, 8, 100),
        spec(16, 8, 3),
        None,
        (2,),
        (1,),
        (1,),
        False,
        (0,),
        1,
    )
    found = conv.from_call(OpCall(op="aten.convolution.default", args=args))
    assert found is not None
    assert (found.h, found.kernel_h, found.padding_h) == (1, 1, 0)
    assert (found.w, found.kernel_w, found.padding_w) == (100, 3, 1)
    assert conv.flops(found) == 2 * 2 * 16 * 50 * 8 * 3


def test_unequal_strides_and_dilations_keep_their_outputs() -> None:
    """Strides 1 and 2, dilations 2 and 1: of a row of 9, 3 taps leave (9 - 3) // 2 + 1 = 4 outputs,
    at the height's stride 1 and dilation 2 those of a row of 4 + 4 = 8.
    """
    rest = (None, (1, 2), (0, 0), (2, 1), False, (0, 0), 1)
    call = OpCall(op="aten.convolution.default", args=(spec(1, 2, 9, 9), spec(2, 2, 3, 3), *rest))
    found = conv.from_call(call)
    assert found is not None
    assert (found.h, found.w, found.stride, found.dilation) == (9, 8, 1, 2)
    assert [int(n) for n in conv.out_sizes(found)] == [1, 5, 4]
    back = replace(call, op="aten.convolution_backward.default")
    back = replace(back, args=(spec(1, 2, 5, 4), *call.args[:2], (0,), *rest[1:], (True,) * 3))
    assert conv.from_call(back) == replace(found, op="backward", bias=True)
    turned = replace(call, args=(*call.args[:6], True, *call.args[7:]))
    assert conv.from_call(turned) == replace(found, w=9, transposed=True)


def test_norms_by_hand() -> None:
    layer = norm.Norm(op="layer", rows=3, cols=8)
    assert norm.flops(layer) == 8 * 24
    assert norm.bytes_moved(layer) == (2 * 24 + 2 * 8) * 4  # x, y, scale, shift
    rms = norm.Norm(op="rms_backward", rows=3, cols=8)
    assert norm.bytes_moved(rms) == (3 * 24 + 2 * 8) * 4  # x, dy, dx, scale, its gradient
    batch = norm.Norm(op="batch_backward", rows=2, cols=9, channels=4)
    assert norm.flops(batch) == 12 * 72
    assert norm.bytes_moved(batch) == (3 * 72 + 3 * 4) * 4


def test_a_statistic_covers_a_row_a_channel_or_a_group() -> None:
    sizes: dict[str, Any] = {"rows": 2, "cols": 16, "channels": 8, "groups": 4}
    batch = norm.features(norm.Norm(op="batch", **{**sizes, "groups": 1}), TOY)
    group = norm.features(norm.Norm(op="group", **sizes), TOY)
    assert (batch["log_statistics"], batch["log_normalised"]) == (3, 5)  # 8 of 2*16
    assert (group["log_statistics"], group["log_normalised"]) == (3, 5)  # 2*4 of 2*16


def test_softmax_and_sums_by_hand() -> None:
    def p(op: str, **sizes: Any) -> reduction.Reduction:
        return replace(reduction.Reduction(op=op, outer=3, size=8), **sizes)

    assert reduction.flops(p("_softmax")) == 5 * 24
    assert reduction.bytes_moved(p("_softmax")) == 2 * 24 * 4
    assert reduction.bytes_moved(p("_softmax_backward_data")) == 3 * 24 * 4
    assert reduction.bytes_moved(p("sum", inner=2)) == (48 + 6) * 4
    assert reduction.bytes_moved(p("max")) == (24 + 3) * 4 + 3 * 8  # and int64 indices
    assert reduction.bytes_moved(p("nll_loss_forward")) == 3 * (8 + 4)  # target, element
    assert reduction.bytes_moved(p("nll_loss_backward")) == 3 * 8 + 24 * 4
    assert reduction.bytes_moved(p("mse_loss", outer=1)) == (2 * 8 + 1) * 4


def test_sums_are_read_in_the_order_of_memory() -> None:
    across = OpCall(op="aten.sum.dim_IntList", args=(spec(4, 6, stride=(1, 4)), (0,)))
    assert reduction.from_sum(across) == reduction.Reduction(op="sum", outer=6, size=4)
    scalar = OpCall(op="aten.sum.default", args=(spec(),))
    assert reduction.from_sum(scalar) == reduction.Reduction(op="sum", outer=1, size=1)
    full = OpCall(op="aten.max.default", args=(spec(4, 6),))
    assert reduction.from_sum(full) == reduction.Reduction(op="amax", outer=1, size=24)


def test_a_small_model_leaves_no_such_op_undescribed() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8)
    )

    def step() -> None:
        y = model(torch.randn(2, 3, 6, 6))
        nn.functional.cross_entropy(y, torch.zeros(2, 8, 8, dtype=torch.long)).backward()

    families = [m.FAMILY for m in (attention, conv, norm, reduction)]
    answers = {op: f for family in families for op, f in family.answers.items()}
    found = [answers[c.op](c) for c in logged(step) if c.op in answers]
    assert None not in found
    kinds = [type(p).__name__ for p in found]
    assert (kinds.count("Conv"), kinds.count("Norm"), kinds.count("Reduction")) == (4, 4, 4)
