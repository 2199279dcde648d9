"""Scripts that take gradients by transforms of ``torch.func``, and forward ones."""

from pathlib import Path

import pytest
from small_scripts import captured, written

SCRIPT = """
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
model = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.AdamW(model.parameters())
named = dict(model.named_parameters())
def output(x, named=named):
    return functional_call(model, named, (x,))
def loss(named, x):
    return output(x, named).square().sum()
for step in range(9):
    x = torch.randn(4, 8, device="cuda")
    LINES
    optimizer.step()
"""
EACH = """each = vmap(grad(loss), in_dims=(None, 0))({n: p.detach() for n, p in named.items()}, x)
    for n, p in named.items():
        p.grad = each[n].mean(0)"""
ALL = "sum(g.sum() for g in grad(loss)(named, x).values()).backward()"
FORWARD = "sum(jvp(output, (x,), (torch.ones_like(x),))).sum().backward()"
DUAL = """with forward_ad.dual_level():
        made = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        (made.primal + made.tangent).sum().backward()"""
Y, W = (4, 2), (2, 8)  # sides of results that are as y or W


def sizes(path: Path) -> list[tuple[int, int]]:
    """The results' last two sides, of products in the order in which they run."""
    calls = captured(path, gpus=1).ranks[0].calls
    return [c.outputs[0].shape[-2:] for c in calls if c.op.split(".")[1] in ("mm", "addmm", "bmm")]


@pytest.mark.parametrize(
    ("lines", "products"),
    [
        (EACH, [Y, W]),  # y, and W's gradient of each sample
        (ALL, [Y, W, Y, W]),  # y, its gradient, and those of the gradient by y's and by W
        (FORWARD, [Y, Y, Y, W, W]),  # y, its tangents by x and by W, which is 0; W's gradients
        (DUAL, [Y, Y, Y, W, W, W, W]),  # there W's tangent has gradients, too
    ],
    ids=["of each sample", "of gradients", "forward", "dual"],
)
def test_products_of_transforms(
    tmp_path: Path, lines: str, products: list[tuple[int, int]]
) -> None:
    """A layer of 8 to 2 on 4 samples; as many products as torch 2.13 runs on tensors with data."""
    assert sizes(written(tmp_path, SCRIPT.replace("LINES", lines))) == products
