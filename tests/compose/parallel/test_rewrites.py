"""Ops, collectives and bytes that tp, cp and ep add to one rank's step."""

from __future__ import annotations

from collections import Counter

import pytest
from plan_case import product_flops

from itercast.compose.capture_model import capture
from itercast.compose.graph.product_roles import DTYPE_CAST
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.cp import context_parallel
from itercast.compose.parallel.ep import expert_parallel
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.work import side_by_side_us
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import ParallelPlan


def sent(capture: StepCapture) -> Counter[tuple[str, str]]:
    found = [c for c in capture.calls if c.op == COLLECTIVE]
    return Counter((c.phase, c.kwargs["kind"]) for c in found)


def test_one_rank_is_no_plan(gpt: StepCapture) -> None:
    for rewrite in (tensor_parallel, context_parallel, expert_parallel):
        assert rewrite(gpt, ParallelPlan(dp=4)) is gpt


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
