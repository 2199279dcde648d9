"""Laws of parameters, gradients and optimizer states of small models under many plans.

What all ranks hold is what one process does, plus what a plan states to copy.
"""

from __future__ import annotations

import pytest
from law_case import SCHEDULES, WIDTH, model, rank_for, tied_gpt

from itercast.compose.simulate.stage_rank import memory, stages_of


def totals(name: str, text: str) -> tuple[int, int]:
    """Bytes of parameters and of gradients over the ranks of one model-parallel replica."""
    rank = rank_for(name, text)
    stages = stages_of(rank) if rank.plan.pp > 1 else [rank]
    layers = [x.layer for stage in stages for x in stage.layers]
    return sum(x.parameter_bytes for x in layers), sum(x.trained_bytes for x in layers)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "frozen", "images"])
def test_stages_hold_each_parameter_once(name: str, schedule: str) -> None:
    """But for weights that the last stage ties to the first's, of which it has a copy."""
    whole = model(name)
    parameters = sum(p.nbytes for p in whole.parameters)
    trained = sum(p.nbytes for p in whole.parameters if p.ready_after >= 0)
    tied = sum(p.nbytes for p in rank_for(name, "").model.graph.tied)
    assert totals(name, "") == (parameters, trained)
    found = totals(name, f"pp=2,micro=2,schedule={schedule}")
    assert found == (parameters + tied, trained + tied)


def test_a_tied_table_is_on_both_ends_of_a_pipeline() -> None:
    """100 x 64 in fp32: 25,600 bytes more, in parameters, gradients and the optimizer's state."""
    ends = [sum(x.layer.parameter_bytes for x in s.layers) for s in stages_of(
        rank_for(tied_gpt(), "pp=2,micro=2")
    )]  # fmt: skip
    blocks = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    assert ends == [25_600 + blocks, 25_600 + blocks]
    alone = memory(rank_for(tied_gpt(), "pp=2,micro=2"), "adamw")
    assert alone["gradients"] == 25_600 + blocks
    assert alone["optimizer"] == 2 * (25_600 + blocks)
    frozen = memory(rank_for(tied_gpt(frozen=True), "pp=2,micro=2"), "adamw")
    assert frozen["parameters"] == 25_600 + blocks
    assert frozen["optimizer"] == 2 * blocks


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "frozen", "images"])
def test_replicas_hold_what_their_strategy_copies(name: str, zero: int) -> None:
    """Eight replicas, two micro-batches: states once from zero=1, gradients once from zero=2.

    Parameters: once from zero=1, their first dimension padded to a multiple of the ranks, but for
    frozen ones under zero=1, which every rank keeps.
    """
    dp = 8
    parameters, trained = totals(name, "")
    rows = [(p, p.shape[0]) for p in model(name).parameters]
    padded = {p.name: p.nbytes // n * dp * -(-n // dp) for p, n in rows}
    cut = sum(padded[p.name] for p, _ in rows if p.ready_after >= 0)
    found = memory(rank_for(name, f"dp={dp},zero={zero},accumulate=2"), "adamw")
    frozen = parameters - trained
    whole = sum(padded.values())
    held = {0: dp * parameters, 1: cut + dp * frozen, 2: whole, 3: whole}[zero]
    assert dp * found["parameters"] == pytest.approx(held, abs=dp)
    assert dp * found["optimizer"] == pytest.approx(2 * trained * (1 if zero else dp), abs=dp)
    assert dp * found["gradients"] == pytest.approx(trained * (1 if zero > 1 else dp), abs=dp)
