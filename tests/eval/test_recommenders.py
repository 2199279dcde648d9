"""Judging forecasts of recommendation models: choices and errors by hand, real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compose.parallel.placement import Placement
from eval.recommenders.judge import Choice, Judged, choices, error_statistics, sharders
from eval.recommenders.measure import ROUNDS, at_one_speed, measurable, measure
from eval.recommenders.tasks import Candidate, any_configuration, any_sharding, heavy_task
from learners.bundle import SHIPPED_CPU


def candidate(name: str, rank: int = 0) -> Candidate:
    model = heavy_task(np.random.default_rng(0))
    small = replace(model, batch=4, tables=tuple(replace(t, rows=50) for t in model.tables[:2]))
    place = Placement("table_wise", (rank,))
    return Candidate(name=name, model=small, sharding=(place, place))


def test_heavy_tasks_are_as_published() -> None:
    """36 to 66 tables, 20 lookups a sample or more."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        model = heavy_task(rng)
        assert 36 <= len(model.tables) <= 66
        assert min(t.pooling for t in model.tables) >= 20


def test_times_are_taken_at_one_speed() -> None:
    """Beside the second round of model 0 the anchor took twice as long."""
    lines = [
        {"model": 0, "times_us": [100.0], "anchors_us": [10.0]},
        {"model": 1, "times_us": [50.0], "anchors_us": [10.0]},
        {"model": 0, "times_us": [220.0], "anchors_us": [20.0]},
        {"model": 1, "times_us": [50.0], "anchors_us": [10.0]},
    ]
    assert at_one_speed(lines) == [(100.0, 110.0), (50.0, 50.0)]


def test_errors_and_retest_by_hand() -> None:
    judged = [
        Judged(candidate=candidate("a"), forecast_us=110.0, rounds_us=(100.0, 100.0)),
        Judged(candidate=candidate("b"), forecast_us=90.0, rounds_us=(100.0, 121.0)),
    ]
    found = error_statistics(judged)
    assert judged[1].measured_us == pytest.approx(110.0)
    assert found["mape_pct"] == pytest.approx((10 + 100 * 20 / 110) / 2)
    assert found["retest_ape_pct"] == pytest.approx(np.sqrt(0.1 * 21))  # 0 counts as 0.1 %


def test_choices_by_hand() -> None:
    """Forecasts prefer b, which is 5 % slower than a; torchrec's formulas see no difference."""
    crowded, spread = candidate("a", 1), candidate("b", 0)
    task = [
        Judged(candidate=crowded, forecast_us=120.0, rounds_us=(100.0,)),
        Judged(candidate=spread, forecast_us=110.0, rounds_us=(105.0,)),
    ]
    by_name = {c.name: c for c in choices([task], 2, SHIPPED_CPU)}
    assert by_name["itercast"].regrets == pytest.approx((0.05,))
    assert by_name["random pick"].regrets == pytest.approx((0.025,))
    assert by_name["itercast"].successes == 1 and by_name["itercast"].fastest == 0
    assert Choice(name="x", regrets=(0.0, 0.11)).successes == 1


def test_there_are_eight_sharders() -> None:
    from compose.sharding.costs import Costs
    from compose.target import find_target

    model = candidate("a").model
    costs = Costs(model, find_target("cpu", "dp=2", SHIPPED_CPU), 2)
    names = [c.name for c in sharders(costs, np.random.default_rng(0))]
    assert len(names) == len(set(names)) == 8


def test_candidates_are_measured_by_real_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model = any_configuration(rng)
    small = replace(model, batch=8, tables=tuple(replace(t, rows=90) for t in model.tables[:3]))
    mixed = Candidate(name="mixed", model=small, sharding=any_sharding(rng, small, 2))
    assert {s.table for s in measurable(mixed, 2).shards} == {0, 1, 2}
    seen: list[int] = []
    rounds = measure([candidate("a"), mixed], 2, 1, tmp_path, seen.append)
    assert len(rounds) == 2 and all(len(r) == ROUNDS and min(r) > 0 for r in rounds)
    assert seen[-1] == 2 * ROUNDS
