"""LoRA under tensor parallelism: of an adapter the factor is cut that meets the layer's cut."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from plan_case import product_flops
from torch import nn

from itercast.compose.capture_model import capture
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.tp import tensor_parallel
from itercast.microbench.cases.external.lora import Adapted
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import ParallelPlan
from itercast.microbench.programs.capture import capture_program
from itercast.microbench.programs.program import COLLECTIVE as SENT

TOKENS, WIDTH, WIDE, RANK = 32, 64, 128, 4


class Block(nn.Module):
    """A pair of linear layers with an adapter each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = Adapted(nn.Linear(WIDTH, WIDE), RANK)
        self.narrow = Adapted(nn.Linear(WIDE, WIDTH), RANK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return y


def model() -> nn.Module:
    """Two blocks of which only the adapters are trained."""
    blocks = nn.Sequential(Block(), Block()).requires_grad_(False)
    for name, p in blocks.named_parameters():
        p.requires_grad_(".down." in name or ".up." in name)
    return blocks


def step() -> StepCapture:
    return capture(
        lambda: (model(), torch.randn(2, TOKENS // 2, WIDTH), lambda y: y.square().sum())
    )


def rank(text: str) -> StepCapture:
    return tensor_parallel(step(), ParallelPlan.parse(text))


@pytest.mark.parametrize("tp", [2, 4])
def test_work_is_conserved(tp: int) -> None:
    """Every rank multiplies by A of a column layer and B of a row layer; with sp its own tokens.

    Each is of 2 * tokens * 64 * 4 flops, three times; the first A's input has no gradient. That
    input is the model's, which sp does not cut.
    """
    whole, one = product_flops(step().calls), 2 * TOKENS * WIDTH * RANK
    assert product_flops(rank(f"tp={tp}").calls) * tp == whole + (tp - 1) * (4 * 3 - 1) * one
    assert product_flops(rank(f"tp={tp},sp").calls) * tp == whole + (tp - 1) * one


def test_torch_does_the_same() -> None:
    """A program of two ranks with torch's styles: same flops, same messages byte for byte."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from itercast.microbench.processes.ranks import join_process_group

    def program():  # type: ignore[no-untyped-def]
        join_process_group("cpu")
        kinds = {"wide.base": ColwiseParallel, "wide.up": ColwiseParallel}
        kinds |= {"narrow.base": RowwiseParallel, "narrow.down": RowwiseParallel}
        cuts = {f"{i}.{path}": kind() for i in (0, 1) for path, kind in kinds.items()}
        blocks = parallelize_module(model(), init_device_mesh("cpu", (2,)), cuts)
        x = torch.randn(2, TOKENS // 2, WIDTH)
        return lambda: blocks(x).square().sum().backward()

    calls = capture_program(program, 2).ranks[0].calls
    made = tensor_parallel(step(), ParallelPlan.parse("tp=2"), summed=False)
    found = Counter((c.kwargs["kind"], c.kwargs["bytes"]) for c in calls if c.op == SENT)
    planned = [(c.kwargs["kind"], c.args[0].nbytes) for c in made.calls if c.op == COLLECTIVE]
    assert found == Counter(planned)
    assert product_flops(calls) == product_flops(made.calls)
