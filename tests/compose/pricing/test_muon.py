"""Muon's products, messages and state by hand, as torch.optim.Muon and Dion's dealing have them."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from law_case import rank_for
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from itercast.capture.opcall import StepCapture
from itercast.capture.programs.capture import capture_program
from itercast.capture.step import hidden_matrices
from itercast.compose.capture_model import capture
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.rank import Run
from itercast.compose.simulate.replicas import micro_batches

# Five steps of X X' (64 x 256 x 64), its square (64 x 64 x 64), and that times X
PRODUCTS = 5 * (2 * 64 * 256 * 64 + 2 * 64**3 + 2 * 64 * 256 * 64)
MATRIX = 64 * 256  # elements


class Stack(nn.Module):
    """Four blocks of two matrices between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        loss: torch.Tensor = torch.logsumexp(self.head(x), -1).sum()
        return loss


@cache
def step() -> StepCapture:
    """A training step with Muon."""
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    return capture(Stack(), tokens, batch=4, seq=16, optimizer="muon")


def update(plan: str) -> Run:
    """The last micro-batch and the optimizer of a rank."""
    return micro_batches(rank_for(step(), plan), "muon")[1]


def flops(run: Run) -> float:
    """Of the optimizer's products."""
    return sum(op.flops for op in run.updates if op.op in ("aten.mm.default", "aten.addmm.default"))


def test_products_are_those_that_torch_computes() -> None:
    """Eight matrices; torch's own counter, over torch.optim.Muon on real tensors, agrees."""
    model = Stack()
    model(torch.zeros(4, 16, dtype=torch.int64)).backward()
    matrices = hidden_matrices(model)
    assert list(matrices)[:3] == ["blocks.0.0.weight", "blocks.0.2.weight", "blocks.1.0.weight"]
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(list(matrices.values())).step()
    assert flops(update("")) == counter.get_total_flops() == 8 * PRODUCTS == 188_743_680


def test_calls_are_those_of_a_program_with_the_optimizer() -> None:
    """As a script that makes torch.optim.Muon and AdamW is captured, after a first step."""

    def program() -> Callable[[], None]:
        model, tokens = Stack(), torch.zeros(4, 16, dtype=torch.int64)
        matrices = list(hidden_matrices(model).values())
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        both = torch.optim.Muon(matrices), torch.optim.AdamW(others, foreach=True)

        def train() -> None:
            model(tokens).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()

        return train

    captured = capture_program(program, 1).ranks[0].calls
    expected = Counter(c.op for c in step().calls if c.phase == "optimizer")
    assert expected["aten.mm.default"] == 8 * 5
    ops = [c.op for c in captured if c.phase == "optimizer" and c.op in expected]
    assert Counter(ops) == expected
    assert ("muon_step", 8) in [c.args for c in captured]


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_that_shard_deal_matrices_and_swap_parts(zero: int) -> None:
    """Of four (256, 64) and four (64, 256) each of two ranks multiplies two.

    One bf16 matrix a turn goes there and back: four turns, eight all_to_alls of 32,768 bytes.
    Momenta and weights are updated on half of each matrix: 8 x 8,192 elements.
    """
    run = update(f"dp=2,zero={zero}")
    assert flops(run) == 4 * PRODUCTS
    swaps = [op for op in run.sent if op.op == "all_to_all"]
    assert len(swaps) == 8
    assert all(op.duration_us == swaps[0].duration_us for op in swaps)
    moved = [op for op in run.updates if op.op == "aten.lerp_.Scalar"]
    assert sum(op.flops for op in moved) == pytest.approx(
        sum(op.flops for op in update("").updates if op.op == "aten.lerp_.Scalar") / 2
    )


def test_three_ranks_take_two_turns_and_replicas_do_all() -> None:
    """Four of a shape over three ranks: the fullest has two of each of the two shapes."""
    assert flops(update("dp=3,zero=1")) == 4 * PRODUCTS
    assert flops(update("dp=2")) == 8 * PRODUCTS
    assert not [op for op in update("dp=2").sent if op.op == "all_to_all"]


def test_tensor_parallel_ranks_gather_and_all_multiply() -> None:
    """Each of two ranks has half of the columns or rows, and gathers eight whole matrices."""
    run = update("tp=2")
    assert flops(run) == 8 * PRODUCTS
    assert [op.op for op in run.sent] == ["all_gather"] * 8
    both = update("tp=2,dp=2,zero=1")
    assert flops(both) == 4 * PRODUCTS
    assert Counter(op.op for op in both.sent)["all_to_all"] == 8


def test_state_is_a_momentum_of_matrices_and_two_numbers_of_others() -> None:
    """Others: table and head of 6,400 each, 4 x 320 biases. fp32; with zero=1 half on each rank."""
    state = 4 * (8 * MATRIX + 2 * (2 * 6_400 + 4 * 320))
    assert memory(rank_for(step(), ""), "muon")["optimizer"] == state == 636_928
    assert memory(rank_for(step(), "dp=2,zero=1"), "muon")["optimizer"] == state // 2
    staged = memory(rank_for(step(), "pp=2,micro=2"), "muon")["optimizer"]
    assert staged == 4 * (4 * MATRIX + 2 * (6_400 + 2 * 320))


def test_what_muon_cannot_update_is_refused() -> None:
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    with pytest.raises(ValueError, match="no matrices in numbered layers"):
        capture(images, torch.zeros(2, 3, 8, 8), lambda y: y.sum(), optimizer="muon")
    with pytest.raises(ValueError, match="fit in no fused kernel"):
        update("dp=2,coconet=split,reorder,fuse")
