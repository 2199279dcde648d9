"""Recurrent layers, volumes read as images: counts by hand, calls; how often sweeps draw what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_calls import described
from torch import nn

from itercast.microbench.ops.matrix import conv, recurrent
from itercast.microbench.ops.memory import pooling
from itercast.microbench.ops.step import host

LAYER = recurrent.Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)
BACK = recurrent.Recurrent(op="lstm_backward", steps=5, batch=3, inputs=6, hidden=8)


def test_an_lstm_layer_by_hand() -> None:
    products = 2 * 15 * 32 * (6 + 8)  # 15 cells, four gates of 8, inputs and state
    assert recurrent.flops(LAYER) == products + 25 * 15 * 8
    assert recurrent.flops(BACK) == 2 * recurrent.flops(LAYER)
    values, weights = 15 * (6 + 2 * 8 + 32), 32 * (6 + 8 + 2)
    assert recurrent.bytes_moved(LAYER) == 4 * (values + weights)
    assert recurrent.bytes_moved(BACK) == 2 * recurrent.bytes_moved(LAYER)


def test_lstms_are_read_layer_by_layer_and_direction() -> None:
    model, x = nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True), torch.randn(3, 5, 6)
    found = [p for p in described(lambda: model(x)[0].sum().backward()) if p is not None]
    layers = [p for p in found if isinstance(p, recurrent.Recurrent)]
    second = recurrent.Recurrent(op="lstm", steps=5, batch=3, inputs=16, hidden=8)
    assert layers[:4] == [LAYER, LAYER, second, second]
    assert [p.inputs for p in layers[4:]] == [16, 16, 6, 6]
    assert {p.op for p in layers[4:]} == {"lstm_backward"}


@pytest.mark.parametrize("p", [LAYER, BACK])
def test_both_ways_to_time_a_layer_compute_the_same(p: recurrent.Recurrent) -> None:
    shapes = ((5, 3, 6), (3, 8), (3, 8))
    torch.manual_seed(0)
    x, h, c = (torch.randn(s) for s in shapes)
    weights = [torch.randn(*s) for s in ((32, 6), (32, 8), (32,), (32,))]
    grad = torch.randn(5, 3, 8)
    on_cpu: Any = recurrent._on_cpu(p, x, h, c, weights, grad)()
    x.requires_grad_()
    on_cuda: Any = recurrent._on_cuda(p, x, h, c, weights, grad)()
    if p.op == "lstm":
        torch.testing.assert_close(on_cpu[0], on_cuda)
    else:
        torch.testing.assert_close(tuple(on_cpu[:5]), tuple(on_cuda))


def test_a_convolution_over_volumes_keeps_its_pixels_and_runs() -> None:
    """Strides 1, 2, 2: a depth of 9 at stride 2 leaves the 5 outputs that one of 5 does at 1."""
    model, x = nn.Conv3d(4, 6, 3, stride=(1, 2, 2), padding=1), torch.randn(2, 4, 5, 8, 8)
    forward, *_, back = (
        p for p in described(lambda: model(x).sum().backward()) if isinstance(p, conv.Conv)
    )
    assert (forward.batch, forward.in_channels, forward.out_channels) == (2, 4, 6)
    assert (forward.depth, forward.kernel_d, forward.padding_d) == (9, 3, 1)
    assert conv.pixels(forward) == (2 * 9 * 64, 2 * 5 * 16)
    assert conv.flops(forward) == 2 * 2 * (5 * 4 * 4) * 6 * (4 * 27)
    assert (back.op, back.batch, back.need_input_grad) == ("backward", 2, False)
    y: Any = conv.build(forward, "cpu").run()
    assert y.shape == (2, 6, 5, 4, 4)
    conv.build(back, "cpu").run()


def test_a_transposed_convolution_over_volumes_counts_its_inputs() -> None:
    model, x = nn.ConvTranspose3d(4, 6, 2, stride=2), torch.randn(2, 4, 3, 8, 8)
    (found,) = described(lambda: model(x))
    assert conv.flops(found) == 2 * 2 * (3 * 8 * 8) * 4 * (6 * 8)


@pytest.mark.parametrize(
    ("layer", "op", "taps", "outputs"),
    [
        (nn.MaxPool3d(2), "max_pool2d_with_indices", 8, 2 * 4 * 4),
        (nn.MaxPool3d(2, dilation=3), "max_pool2d_with_indices", 8, 1 * 3 * 3),
        (nn.AvgPool3d((1, 2, 2)), "avg_pool2d", 4, 4 * 4 * 4),
        (nn.AdaptiveAvgPool3d((2, 4, 4)), "_adaptive_avg_pool2d", 8, 2 * 4 * 4),
        (nn.Upsample(scale_factor=2, mode="trilinear"), "upsample_bilinear2d", 8, 8 * 16 * 16),
    ],
)
def test_pools_of_volumes_are_pools_of_all_their_rows(
    layer: nn.Module, op: str, taps: int, outputs: int
) -> None:
    x = torch.randn(1, 3, 4, 8, 8, requires_grad=True)
    forward, back = (
        p for p in described(lambda: layer(x).sum().backward()) if isinstance(p, pooling.Pooling)
    )
    assert (forward.op, back.op) == (op, f"{op}_backward")
    assert pooling.flops(forward) == 3 * outputs * taps
    assert forward.h * forward.w == 4 * 8 * 8
    assert back.out_h * back.out_w == outputs


def test_a_host_is_timed_three_times_before_wrappers() -> None:
    ops = [p.op for p in host.sweep()]
    first = next(i for i, op in enumerate(ops) if op in (*host.WRAPPERS, *host.SHARDED))
    assert all(ops[:first].count(event) == 4 for event in host.EVENTS)  # the fourth round's own
    assert all(ops.count(op) == 8 for op in (*host.EVENTS, *host.WRAPPERS))
