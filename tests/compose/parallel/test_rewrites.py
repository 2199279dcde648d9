"""Ops, collectives and bytes that tp, cp and ep add to one rank's step, and to adapters."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from plan_case import product_flops
from torch import nn

from itercast.capture.cases.external.lora import Adapted
from itercast.capture.opcall import StepCapture, TensorSpec, changed
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.capture import capture_program
from itercast.capture.programs.program import COLLECTIVE as SENT
from itercast.compose.capture_model import capture
from itercast.compose.graph.product_roles import DTYPE_CAST
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.ep import expert_parallel
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.work import side_by_side_us


def sent(capture: StepCapture) -> Counter[tuple[str, str]]:
    found = [c for c in capture.calls if c.op == COLLECTIVE]
    return Counter((c.phase, c.kwargs["kind"]) for c in found)


def test_a_changed_tensor_keeps_nothing_that_was_computed() -> None:
    """2 x 3 fp32 elements are 24 bytes, 4 x 3 are 48."""
    small = TensorSpec(shape=(2, 3), dtype="fp32", storage=7)
    assert small.nbytes == 24 and {small: 1}[small]
    large = changed(small, shape=(4, 3))
    assert large == TensorSpec(shape=(4, 3), dtype="fp32", storage=7)
    assert large.nbytes == 48 and hash(large) == hash(replace(small, shape=(4, 3)))


def test_tensor_parallel_cuts_the_casts_of_weights(gpt: StepCapture) -> None:
    """Under autocast products read casts of weights; a rank casts its shard only."""
    mixed = capture("gpt-s", batch=4, seq=32, dtype="bf16", amp=True)
    made = tensor_parallel(mixed, ParallelPlan(tp=2, amp=True))
    assert product_flops(made.calls) == product_flops(mixed.calls) / 2
    matrices = {p.storage for p in mixed.parameters if len(p.shape) == 2}
    both = [[c.args[0] for c in x.calls if c.op == DTYPE_CAST] for x in (mixed, made)]
    whole, part = (sum(t.numel for t in casts if t.storage in matrices) for casts in both)
    assert part == whole / 2 > 0


def test_features_that_interact_are_whole() -> None:
    """A DLRM of 13-128-64-32 and 53-256-128-1: two layers of each perceptron are a pair.

    Products of 7 vectors of 32 by each other need all columns, so that the third bottom layer stays
    whole, as the last one of one column. Four samples in forward.
    """
    made = tensor_parallel(capture("dlrm-s", batch=4), ParallelPlan(tp=2))
    pairs = 13 * 128 + 128 * 64 + 53 * 256 + 256 * 128
    whole = 64 * 32 + 7 * 7 * 32 + 128
    flops = product_flops(c for c in made.calls if c.phase == "forward")
    assert flops == 4 * 2 * (pairs // 2 + whole)


def test_layers_of_one_input_may_reduce_its_gradient_each(gpt: StepCapture) -> None:
    """torch's ColwiseParallel: one more all_reduce for q and kv in each of two blocks."""
    made = tensor_parallel(gpt, ParallelPlan(tp=2), summed=False)
    assert sent(made)[("backward", "all_reduce")] == 5 + 2


def test_a_loss_cut_by_vocabulary_reduces_three_numbers_per_token(gpt: StepCapture) -> None:
    """Maximum, sum of exponentials and the label's logit; each pass is over half the logits."""
    made = tensor_parallel(gpt, ParallelPlan(tp=2))
    small = [c for c in made.calls if c.op == COLLECTIVE and c.phase == "loss"]
    assert [c.args[0].nbytes for c in small] == [4 * gpt.tokens] * 3
    passes = [c.outputs[0].numel for c in made.calls if c.op == "aten.exp.default"]
    assert passes == [gpt.tokens * 512 // 2] * 2  # forward and backward
    assert made.host["tp_loss"] == 1
    assert not any("log_softmax" in c.op for c in made.calls)


def test_experts_must_be_there_and_divide(gpt: StepCapture) -> None:
    mixture = capture("moe-s")
    with pytest.raises(ValueError, match="ep does not divide 4 experts"):
        expert_parallel(mixture, ParallelPlan(dp=3, ep=3))
    with pytest.raises(ValueError, match="the model has none"):
        expert_parallel(gpt, ParallelPlan(dp=4, ep=4))


def test_overlapped_collectives_cost_what_contention_adds() -> None:
    assert side_by_side_us(10, 4, 1.0) == 10
    assert side_by_side_us(10, 4, 2.0) == 14
    assert side_by_side_us(4, 10, 1.5) == 12


TOKENS, WIDTH, WIDE, RANK = 32, 64, 128, 4


class Fused(nn.Module):
    """Attention that is not fused, of queries, keys and values that one layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        parts = self.qkv(x).split(WIDTH, dim=2)
        q, k, v = (t.view(batch, seq, 4, WIDTH // 4).transpose(1, 2) for t in parts)
        y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        found: torch.Tensor = x + self.out(y.transpose(1, 2).reshape(batch, seq, WIDTH))
        return found


@pytest.mark.parametrize("batch", [1, 2])
def test_fused_queries_and_keys_of_one_sample_are_cut(batch: int) -> None:
    """Scores of one sample multiply two parts of one tensor as it lies in memory, of two copies.

    A rank of two has half of both layers.
    """
    x = torch.zeros(batch, 8, WIDTH)
    step = capture(lambda: (Fused(), x, torch.Tensor.sum), (), optimizer="none")
    part = tensor_parallel(step, ParallelPlan(tp=2))
    assert [2 * own.nbytes for own in part.parameters] == [p.nbytes for p in step.parameters]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt-s", "llama-s", "bert-s", "vit-m", "moe-s"])
def test_what_a_rank_holds_does_not_depend_on_the_batch(name: str, attn: str) -> None:
    one, two = (
        tensor_parallel(capture(name, batch=n, attn=attn), ParallelPlan(tp=2)).parameters
        for n in (1, 2)
    )
    assert [p.shape for p in one] == [p.shape for p in two]


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
