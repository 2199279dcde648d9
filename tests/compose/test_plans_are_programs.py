"""A plan's rewritten graph does what torch's own parallel program does: its flops, its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from law_case import rank_for
from plan_case import CPU

from itercast.compose.capture_model import capture, micro_size
from itercast.compose.simulate.iteration import _micro_batches
from itercast.eval.programs import captured
from itercast.microbench.cases.registry import case
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.opcall import OpCall
from itercast.microbench.ops import find_family
from itercast.microbench.plan import ParallelPlan
from itercast.microbench.programs.program import COLLECTIVE

REPLICAS = ("dp=2", "dp=2,zero=1,accumulate=2", "dp=2,zero=2", "dp=4,hsdp=2,zero=3")
CUT = ("tp=2", "dp=2,tp=2,zero=3")
CASES = [(name, plan) for name in ("gpt-s", "llama-s") for plan in (*REPLICAS, *CUT)]
CASES += [(name, plan) for name in ("vit-s", "moe-s") for plan in REPLICAS]
CASES += [("bert-s", plan) for plan in (*REPLICAS[1:], "tp=2")]
CASES += [("dlrm-s", plan) for plan in REPLICAS[1:]]
Sent = Counter[tuple[str, int]]  # kind and bytes
# Exceptions, with what differs:
# bert-s, dp=2: gradients that are ready together go into buckets in another order, 512 B of 1 MB.
# dlrm-s, dp=2: DDP broadcasts all buffers; the plan those of batch norms only.
# moe-s, tp: torch's plan here cuts attention only, a plan in words the experts too.
# vit-s and dlrm-s, tp: three heads, or none.


def flops(calls: Sequence[OpCall]) -> float:
    """Those of matrix products, convolutions and attention."""
    found = [(f, p) for c in calls if c.phase != "optimizer" for f, p in [find_family(c)]]
    return sum(float(f.flops(p)) for f, p in found if f is not None and f.matmul)


def planned(name: str, text: str) -> tuple[float, Sent]:
    """Flops and messages of a rank's step; the test's pricer takes 1 us per KiB of a message."""
    chosen, plan = case(name), ParallelPlan.parse(text)
    rank = rank_for(capture(name, **micro_size(name, plan, chosen.batch, chosen.seq)), text, CPU)
    before, last = _micro_batches(rank, "adamw")
    sent: Sent = Counter()
    for run, times in [*before, (last, 1)]:
        for op in run.sent:
            sent[op.op, round(1024 * op.duration_us)] += times
    for layer in rank.layers:
        for op in (*layer.forward, *layer.backward):
            if op.phase == "comm":
                sent[op.op, round(1024 * op.duration_us)] += plan.microbatches
    return plan.microbatches * flops(rank.model.graph.capture.calls), sent


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_plan_does_what_the_program_does(name: str, text: str) -> None:
    """Messages are those that torch sends, byte for byte.

    FSDP2 pads a parameter to whole rows of every rank: its messages are longer than its bytes.
    """
    calls = captured(iteration_of(case(name), text)).ranks[0].calls
    expected, sent = planned(name, text)
    assert flops(calls) == pytest.approx(expected, rel=0.005)
    found = [c.kwargs for c in calls if c.op == COLLECTIVE]
    assert Counter((c["kind"], c["bytes"]) for c in found) == sent
    plan = ParallelPlan.parse(text)
    assert {len(c["ranks"]) for c in found} <= {plan.tp, plan.shards, plan.dp // plan.shards}
