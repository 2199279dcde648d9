"""How well forecasts order a model's plans, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from report_facts import case

from itercast.eval.ranking import (
    choices,
    ranking_lines,
    ranking_metrics,
    rankings,
    software_metrics,
)
from itercast.eval.results import CaseResult


def of(plan: str, predicted_us: float, measured_us: float, ranks: int, samples: int) -> CaseResult:
    """A plan of one model."""
    one = replace(case("a", predicted_us, measured_us), plan=plan)
    return replace(one, ranks=ranks, samples=samples)


# us per sample: predicted 10, 8, 7, 9 against measured 10, 9, 8, 7: 4 of 6 pairs in order
PLANS = [
    of("", 40, 40, 1, 4),
    of("dp=2", 64, 72, 2, 8),
    of("tp=2", 28, 32, 2, 4),
    of("pp=2", 36, 28, 2, 4),
]


def test_tau_counts_pairs_of_plans_by_time_per_sample() -> None:
    found = rankings(PLANS)
    assert [(r.model, r.plans) for r in found] == [("a", 4)]
    assert found[0].kendall_tau == pytest.approx((4 - 2) / 6)
    assert found[0].retest_tau is None  # measured once
    assert rankings(PLANS[:2]) == []  # two plans are no ranking


def test_the_noise_floor_of_a_ranking_is_another_round() -> None:
    """Per sample 10, 9, 8 us and then 10, 8, 9: two of three pairs as before."""
    rounds = zip(PLANS[:3], (40, 72, 32), (40, 64, 36), strict=True)
    twice = [replace(r, rounds_us=(first, again)) for r, first, again in rounds]
    assert rankings(twice)[0].retest_tau == pytest.approx(1 / 3)
    assert "two rounds of measurements: 0.33" in ranking_lines(twice)[0]


def test_the_chosen_plan_is_judged_by_its_measured_time() -> None:
    """Of three plans on two ranks tp=2 is chosen: 8 us a sample, the best one takes 7."""
    (found,) = choices(PLANS)
    assert (found.chosen, found.best, found.ranks, found.plans) == ("tp=2", "pp=2", 2, 3)
    assert found.slower_pct == pytest.approx(100 / 7)
    right = [*PLANS[:2], replace(PLANS[2], measured_us=29), PLANS[3]]
    assert choices(right)[0].slower_pct == pytest.approx(100 * (29 / 28 - 1))
    assert ranking_metrics(right)["chosen_close_frac"] == 1.0
    assert ranking_metrics(PLANS)["chosen_close_frac"] == 0.0


def test_ranking_is_said_where_there_are_plans() -> None:
    tau, chosen = ranking_lines(PLANS)
    assert "Kendall tau 0.33" in tau
    assert "in 0 of 1 cases; a on 2: tp=2 is 14 % slower than pp=2" in chosen
    assert ranking_lines(PLANS[:1]) == [] and ranking_metrics(PLANS[:1]) == {}


def test_the_fastest_software_of_each_call() -> None:
    """Two calls of four stacks and one of two.

    The first one's order is right but for one pair of six. The second one's fastest (1 us) comes
    last, the choice takes 2: 3 of 6 pairs are in order.
    """
    call = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    measured = np.array([1.0, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    guess = np.array([1.0, 2, 4, 3, 9, 2, 3, 4, 5, 1])
    stack = np.array([*"abcdabcdab"])
    found = software_metrics(call, stack, guess, measured, 4)
    assert found == pytest.approx(
        {
            "top1_pct": 50,
            "top3_pct": 50,
            "pairwise_pct": 100 * (5 / 6 + 3 / 6) / 2,
            "slower_pct": 100 * (0 + 1) / 2,
            "calls": 2,
        }
    )
    assert software_metrics(call, stack, guess, measured, 2)["calls"] == 3
    assert software_metrics(call, stack, guess, measured, 5) == {}
    twice = np.array([*"abcaabcdab"])  # the first call's first stack was measured twice
    assert software_metrics(call, twice, guess, measured, 4)["calls"] == 1
