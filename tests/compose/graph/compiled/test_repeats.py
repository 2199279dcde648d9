"""Casts to fp8 of a compiled script: what torchao asks twice is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.opcall import OpCall
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.compiled.repeats import without_repeats

LAYER = """
import torch

def cast(x):  # as torchao's tensor_to_scale and to_fp8_saturated
    scale = 448 / x.abs().max().to(torch.float64).clamp(min=1e-12)
    scale = scale.float()
    return (x.to(torch.float32) * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        (a, s), (b, t) = cast(x), cast(w.t())
        return torch._scaled_mm(a, b, 1 / s, 1 / t, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        (a, s), (b, t) = cast(grad), cast(w.t())
        to_x = torch._scaled_mm(a, b.contiguous().t(), 1 / s, 1 / t, out_dtype=torch.bfloat16)
        (a, s), (b, t) = cast(grad), cast(x)
        a, b = a.t().contiguous(), b.t().contiguous().t()
        return to_x, torch._scaled_mm(a, b, 1 / s, 1 / t, out_dtype=torch.bfloat16)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(512, 256, dtype=torch.bfloat16))
    def forward(self, x):
        return Product.apply(x, self.weight)

layer = Layer().cuda()
optimizer, layer = torch.optim.SGD(layer.parameters()), torch.compile(layer)
for step in range(10):
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16))
    optimizer.step()
"""
X, W, G = 1024 * 256, 512 * 256, 1024 * 512  # elements of the input, the weight, the gradient


def bytes_of(calls: tuple[OpCall, ...], phase: str) -> list[tuple[int, int]]:
    """Bytes that each kernel reads and writes, but for single numbers."""
    kernels = [c for c in calls if c.op == "itercast.fused" and c.phase == phase]
    return [
        tuple(sum(t.nbytes for t in some if t.shape) for some in (c.tensors(), c.outputs))
        for c in kernels
    ]


def test_tensors_are_read_for_their_scale_and_for_their_casts(tmp_path: Path) -> None:
    """2 bytes a number in bf16, 1 in fp8; a scale's kernel writes one number.

    Forward: input and weight are read for scales and again to be cast. Backward: the gradient, too,
    whose two casts are one kernel; the weight's scale is there; the input is kept in fp8.
    """
    step = captured(written(tmp_path, LAYER), gpus=1).ranks[0]
    calls = inductor_kernels(step, apart=lambda call: not call.compiled).calls
    forward = [(2 * X, 0), (2 * X, X), (2 * W, 0), (2 * W, W)]
    assert bytes_of(calls, "forward") == forward
    assert bytes_of(calls, "backward") == [(2 * G, 0), (2 * G, 2 * G), (2 * W, W), (X, X)]
    assert len([c for c in calls if "_scaled_mm" in c.op]) == 3


@pytest.mark.parametrize("overwritten", [True, False])
def test_equal_calls_are_one_unless_what_they_read_changes(
    tmp_path: Path, overwritten: bool
) -> None:
    """Two squares of one tensor; between them it may be written over."""
    text = """
import torch
weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
optimizer = torch.optim.SGD([weight])
@torch.compile
def run(x):
    y = x.exp()
    first = y.sin()
    OTHER
    return (first * y.sin()).sum()
for step in range(10):
    run(weight.detach()).item()
    weight.sum().backward()
    optimizer.step()
"""
    text = text.replace("OTHER", "y.add_(1)" if overwritten else "pass")
    step = captured(written(tmp_path, text), gpus=1).ranks[0]
    found = without_repeats(step, lambda call: bool(call.compiled)).calls
    assert sum("sin" in c.op for c in found) == 1 + overwritten
