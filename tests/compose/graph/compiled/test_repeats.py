"""Compiled scripts: equal casts are computed once, equal messages are sent once."""

from collections import Counter
from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.opcall import OpCall
from itercast.capture.programs.program import COLLECTIVE
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.compiled.repeats import without_repeats
from itercast.compose.programs.price import uncompiled

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
    calls = inductor_kernels(without_repeats(step, apart=uncompiled), apart=uncompiled).calls
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
    found = without_repeats(step).calls
    assert sum("sin" in c.op for c in found) == 1 + overwritten


LAYERS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
dist.init_process_group("nccl")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(512)
        self.a, self.b, self.c, self.out = (nn.Linear(512, 512, bias=False) for _ in range(4))
    def forward(self, x):
        h = self.norm(x)
        return self.out(self.a(h) * self.b(h) * self.c(h))
cut = {name: ColwiseParallel(input_layouts=Shard(1)) for name in "abc"}
block = parallelize_module(Block().cuda(), init_device_mesh("cuda", (4,)), {
    "norm": SequenceParallel(), "out": RowwiseParallel(output_layouts=Shard(1)), **cut})
model = torch.compile(block) if "compiled" in sys.argv else block
optimizer = torch.optim.SGD(block.parameters())
for _ in range(4):
    x = torch.randn(2, 256, 512, device="cuda", requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("words", "gathers"), [(("compiled",), 1), ((), 3)])
def test_layers_that_share_their_input_gather_it_once_if_compiled(
    tmp_path: Path, words: tuple[str, ...], gathers: int
) -> None:
    """Three layers gather 2 x 1,024 x 512 rows, and lay them out by samples again (``cat``).

    Each of their gradients is scattered on its own, and that of ``out`` is gathered, as torch's
    graphs have it: forward 1 gather and 1 scatter, backward 1 gather and 3 scatters.
    """
    step = captured(written(tmp_path, LAYERS), *words, gpus=4).ranks[0]
    calls = without_repeats(step, apart=uncompiled).calls
    sent = Counter((c.phase, c.kwargs["kind"]) for c in calls if c.op == COLLECTIVE)
    assert sent["forward", "all_gather"] == gathers
    assert sum(c.op == "aten.cat.default" and c.phase == "forward" for c in calls) == gathers + 1
    assert sent["forward", "reduce_scatter"] == sent["backward", "all_gather"] == 1
    assert sent["backward", "reduce_scatter"] == 3


CHECKPOINT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(512, 512, bias=False) for _ in range(3))
    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))
block = Gated().cuda().bfloat16()
model = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False))
optimizer = torch.optim.SGD(block.parameters())
for _ in range(4):
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
"""


def test_backward_computes_pointwise_results_of_a_checkpoint_in_its_own_kernels(
    tmp_path: Path,
) -> None:
    """What the checkpoint runs again makes ``silu(gate) * up`` alone: 2 tensors read, 1 written.

    The gradient's kernel computes ``silu`` itself: it reads gate, up and the gradient, and writes
    two gradients; the last kernel adds what both layers give to x. Each tensor is of 1 MiB.
    """
    step = captured(written(tmp_path, CHECKPOINT), gpus=1).ranks[0]
    kernels = [c for c in inductor_kernels(step, apart=uncompiled).calls if "fused" in c.op]
    whole = [
        (c.recomputed, *(sum(t.nbytes == 2**20 for t in some) for some in (c.tensors(), c.outputs)))
        for c in kernels
        if c.phase == "backward"
    ]
    assert [one for one in whole if sum(one[1:]) > 2] == [
        (True, 2, 1),
        (False, 3, 2),
        (False, 2, 1),
    ]
