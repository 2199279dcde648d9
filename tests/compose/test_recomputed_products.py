"""Utilisation counts what a model computes, not what its checkpoints compute again."""

from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target

SCRIPT = """
import torch, torch.nn.functional as F
from functools import partial
from torch import nn
from torch.utils import checkpoint
class Own(torch.autograd.Function):  # whose forward computes without gradients
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.up = nn.Linear(32, 96, bias=False), nn.Linear(32, 128, bias=False)
        self.down = nn.Parameter(torch.zeros(128, 32))
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + Own.apply(F.relu(self.up(x)), self.down)
class Again(torch.autograd.Function):  # as Megatron's and DeepSpeed's
    @staticmethod
    def forward(ctx, run, x, anchor):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, None
products = [torch.ops.aten.mm.default]
kept = partial(checkpoint.create_selective_checkpoint_contexts, products)
embed = torch.zeros(32, device="cuda", requires_grad=True)
kinds = {
    "nothing": lambda block, x: block(x),
    "all": partial(checkpoint.checkpoint, use_reentrant=False),
    "all, reentrant": partial(checkpoint.checkpoint, use_reentrant=True),
    "all but products": partial(checkpoint.checkpoint, use_reentrant=False, context_fn=kept),
    "all, by hand": lambda block, x: Again.apply(block, x, embed),
    "all, twice": lambda block, x: checkpoint.checkpoint(
        lambda y: checkpoint.checkpoint(block, y, use_reentrant=False), x, use_reentrant=False),
}
import sys
run, blocks = kinds[sys.argv[1]], nn.ModuleList([Block(), Block()]).cuda()
optimizer = torch.optim.AdamW([embed, *blocks.parameters()])
for _ in range(4):
    x = torch.randn(4, 16, 32, device="cuda") + embed
    for block in blocks:
        x = run(block, x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
KINDS = ("nothing", "all", "all, reentrant", "all but products", "all, by hand", "all, twice")


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_checkpoints_count_once(tmp_path: Path, kind: str) -> None:
    """6 flops of 64 tokens for each weight; attention: 2 products, backward 2.5 times as many."""
    program = captured(written(tmp_path, SCRIPT), kind, gpus=1)
    weights = 2 * (32 * 96 + 2 * 32 * 128)
    attention = 2 * 3.5 * 2 * 2 * 4 * 16 * 16 * 32  # of 4 sequences of 16, 32 wide
    found = forecast_program(program, find_target("v100-sxm-16gb", "", None, "", ""))
    products_s = found.mfu_frac * found.iteration_us * 1e-6
    assert products_s == pytest.approx((6 * 64 * weights + attention) / 15.7e12)
    again = sum(call.recomputed for call in program.ranks[0].calls if ".mm." in call.op)
    assert (again > 0) == (kind not in ("nothing", "all but products"))
