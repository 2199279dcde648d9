"""Ops, collectives and bytes that tp, cp and ep add to one rank's step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from plan_case import product_flops
from torch import nn

from itercast.compose.capture_model import capture
from itercast.compose.graph.product_roles import DTYPE_CAST, weight_roles
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.cp import context_parallel
from itercast.compose.parallel.ep import expert_parallel
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.work import side_by_side_us
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import ParallelPlan

ACTIVATION_BYTES = 4 * 64 * 96 * 4  # batch * tokens * width * fp32


def sent(capture: StepCapture) -> Counter[tuple[str, str]]:
    found = [c for c in capture.calls if c.op == COLLECTIVE]
    return Counter((c.phase, c.kwargs["kind"]) for c in found)


def test_one_rank_is_no_plan(gpt: StepCapture) -> None:
    for rewrite in (tensor_parallel, context_parallel, expert_parallel):
        assert rewrite(gpt, ParallelPlan(dp=4)) is gpt


def test_pairs_of_products_are_found_by_following_data(gpt: StepCapture) -> None:
    names = {p.storage: p.name for p in gpt.parameters}
    found = {names[s]: role for s, role in weight_roles(gpt).items()}
    assert found.pop("tokens.weight") == "vocabulary"
    columns = {n.split(".", 2)[2] for n, role in found.items() if role == "column"}
    rows = {n.split(".", 2)[2] for n, role in found.items() if role == "row"}
    assert columns == {"attention.q.weight", "attention.kv.weight", "mlp.up.weight"}
    assert rows == {"attention.out.weight", "mlp.down.weight"}


class NormedHeads(nn.Module):
    """Attention that norms the queries and keys of each head, as Qwen 3 does, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "o": (64, 64)}
        sizes |= {"up": (64, 96), "down": (96, 64)}
        self.layers = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in sizes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.layers[n](x).view(2, 8, 4, 16) for n in "qkv")
        q, k = (t * t.square().mean(-1, keepdim=True).rsqrt() for t in (q, k))
        heads = (t.transpose(1, 2) for t in (q, k, v))
        x = x + self.layers["o"](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        x = x * x.square().mean(-1, keepdim=True).rsqrt()
        return x + self.layers["down"](self.layers["up"](x).relu())


def test_a_norm_of_each_head_may_stand_between_a_pair() -> None:
    """It works on one rank's heads; a norm of the whole width ends a pair."""
    step = capture(lambda: (NormedHeads(), torch.randn(2, 8, 64), lambda y: y.square().mean()))
    names = {p.storage: p.name.split(".")[1] for p in step.parameters}
    found = {names[s]: role for s, role in weight_roles(step).items()}
    assert found == {**dict.fromkeys([*"qkv", "up"], "column"), "o": "row", "down": "row"}
    made = tensor_parallel(step, ParallelPlan(tp=2))
    shapes = {c.args[0].shape for c in made.calls if c.op == "itercast.sdpa"}
    assert shapes == {(2, 2, 8, 16)}
    assert product_flops(made.calls) == product_flops(step.calls) / 2


def test_tensor_parallel_cuts_the_casts_of_weights(gpt: StepCapture) -> None:
    """Under autocast products read casts of weights; a rank casts its shard only."""
    mixed = capture("gpt-s", batch=4, seq=32, dtype="bf16", amp=True)
    made = tensor_parallel(mixed, ParallelPlan(tp=2, amp=True))
    assert product_flops(made.calls) == product_flops(mixed.calls) / 2
    matrices = {p.storage for p in mixed.parameters if len(p.shape) == 2}
    both = [[c.args[0] for c in x.calls if c.op == DTYPE_CAST] for x in (mixed, made)]
    whole, part = (sum(t.numel for t in casts if t.storage in matrices) for casts in both)
    assert part == whole / 2 > 0


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
