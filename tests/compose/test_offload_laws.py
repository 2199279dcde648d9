"""Laws of offloaded activations: copies take PCIe's time, and never less than their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_plans import drawn
from law_case import Bare, outcome, rank_for
from plan_case import GPU, Flat

from itercast.compose.simulate.rank import OFFLOAD_FRAC
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stages import stages_of

SLOW = replace(GPU, name="slow-pcie", pcie_bytes_per_s=1e8)
RATE = SLOW.pcie_bytes_per_s * OFFLOAD_FRAC["pcie"]


@pytest.mark.parametrize("text", ["", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp=4"])
def test_what_layers_save_goes_to_the_host_and_back(text: str) -> None:
    """Every layer's bytes, once each way, in each of two micro-batches, whatever ZeRO shards."""
    rank = rank_for("gpt", f"{text},accumulate=2,offload=activations".strip(","), SLOW)
    sent: dict[str, float] = {"d2h": 0.0, "h2d": 0.0}
    for _ in range(2):
        program = RankProgram(rank)
        program.forward()
        program.backward(later=False, sync=True)
        for op in program.run().sent:
            if op.op in sent:
                sent[op.op] += op.duration_us
    saved_us = sum(x.saved_bytes for x in rank.layers) / RATE * 1e6
    assert sent == pytest.approx({"d2h": 2 * saved_us, "h2d": 2 * saved_us})


@pytest.mark.parametrize(("name", "text"), [*drawn(40, 3, least="offload")])
def test_offloaded_activations_are_never_free(name: str, text: str) -> None:
    """A step is no shorter than without, nor than the bytes that go to the host and come back."""
    text = text.replace("offload=optimizer", "offload=activations")
    plain = ",".join(part for part in text.split(",") if "offload" not in part)
    kept, moved = (outcome(name, t, SLOW, Bare) for t in (plain, text))
    assert moved.iteration_us >= kept.iteration_us * (1 - 1e-9)
    rank = rank_for(name, text, SLOW, Bare)
    stages = [sum(x.saved_bytes for x in s.layers[:-2]) for s in stages_of(rank)]
    ways = 2 * rank.plan.microbatches
    assert moved.iteration_us >= ways * max(stages) / RATE * 1e6 * (1 - 1e-9)


def test_a_copy_runs_beside_the_next_layer_alone() -> None:
    """Memory has room for two layers: the third forward waits for the first one's copy.

    Equal layers of 1 us a call whose copies take long: forward ends after all but the last two
    copies, each of which begins when the one before is done.
    """
    rank = rank_for("gpt", "offload=activations", SLOW, Flat)
    program = RankProgram(rank)
    program.forward()
    run = program.run()
    copies = [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes == ("d2h",)]
    work = [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes == ("compute",)]
    assert len(copies) == len(work) == len(rank.layers)
    for third, first in zip(work[2:], copies, strict=False):
        assert third.start_us >= first.end_us
    for second, first in zip(work[1:], copies, strict=False):
        assert second.start_us < first.end_us or first.end_us == first.start_us
