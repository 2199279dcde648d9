"""Judging forecasts of recommendation models: choices and errors by hand, real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from itercast.compose.parallel.placement import Placement
from itercast.eval.recommenders.__main__ import libraries_table
from itercast.eval.recommenders.judge import (
    TORCHREC_OPTIMIZERS,
    Bench,
    Choice,
    Judged,
    by_both_libraries,
    choices,
    correlations,
    error_statistics,
    judged,
    sharders,
)
from itercast.eval.recommenders.lookups import score
from itercast.eval.recommenders.measure import ROUNDS, Measured, at_one_speed, measurable, measure
from itercast.eval.recommenders.points import dense_points, lookup_points, message_points
from itercast.eval.recommenders.tasks import Candidate, any_configuration, any_sharding, heavy_task
from itercast.learners.bundle import SHIPPED_CPU
from itercast.microbench.iterations.sharded_model import STAGES
from itercast.microbench.ops.lookup import embedding_bag
from itercast.microbench.ops.lookup.random_streams import KINDS, stream_kind

BENCH = Bench(ranks=2, bundle=SHIPPED_CPU, out=Path())


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
        {"model": 0, "times_us": [100.0], "stages_us": [[60.0, 40.0]], "anchors_us": [10.0]},
        {"model": 1, "times_us": [50.0], "stages_us": [[30.0, 20.0]], "anchors_us": [10.0]},
        {"model": 0, "times_us": [220.0], "stages_us": [[160.0, 60.0]], "anchors_us": [20.0]},
        {"model": 1, "times_us": [50.0], "stages_us": [[30.0, 20.0]], "anchors_us": [10.0]},
    ]
    first, second = at_one_speed(lines, 10.0).values()
    assert (first.rounds_us, second.rounds_us) == ((100.0, 110.0), (50.0, 50.0))
    assert first.stages_us.tolist() == [[70.0, 35.0]]  # means of 60, 80 and 40, 30


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
    by_name = {c.name: c for c in choices([task], BENCH)}
    assert by_name["itercast"].regrets == pytest.approx((0.05,))
    assert by_name["random pick"].regrets == pytest.approx((0.025,))
    assert by_name["itercast"].successes == 1 and by_name["itercast"].fastest == 0
    assert Choice(name="x", regrets=(0.0, 0.11)).successes == 1


def test_a_choice_by_one_round_is_judged_by_the_next() -> None:
    """a is faster at first, and 20 % slower than b in the second round."""
    task = [
        Judged(candidate=candidate("a"), forecast_us=1.0, rounds_us=(90.0, 120.0)),
        Judged(candidate=candidate("b"), forecast_us=2.0, rounds_us=(100.0, 100.0)),
    ]
    by_name = {c.name: c for c in choices([task], BENCH)}
    assert by_name["measuring once"].regrets == pytest.approx((0.2,))


def test_correlations_are_within_tasks() -> None:
    """The second task is 10 times as long; forecasts order each task rightly, rounds disagree."""
    tasks = [
        [
            Judged(candidate=candidate("a"), forecast_us=1.0, rounds_us=(k * 2.0, k * 1.0)),
            Judged(candidate=candidate("b"), forecast_us=3.0, rounds_us=(k * 1.0, k * 8.0)),
        ]
        for k in (1.0, 10.0)
    ]
    assert correlations(tasks) == pytest.approx((1.0, -1.0))


def test_stages_of_the_forecast_and_of_the_rank_that_works_longest() -> None:
    """Rank 1 looks up and updates for 9 us, rank 0 for 5; all steps are in one of five stages."""
    one = candidate("a")
    forecast = BENCH.forecaster(one.model).forecast(one.sharding)
    stages = np.array([[1.0, 2.0, 8.0, 3.0, 1.0], [1.0, 5.0, 5.0, 4.0, 1.0]])
    found = judged(one, forecast, Measured(rounds_us=(16.0,), stages_us=stages))
    assert found.stages_us == (1.0, 5.0, 5.0, 4.0, 1.0)
    assert sum(found.forecast_stages_us) == pytest.approx(forecast.iteration_us)
    assert found.forecast_stages_us[1] == pytest.approx(forecast.steps_us["look up"])


def test_the_model_s_optimizer_is_measured() -> None:
    one = candidate("a")
    adam = replace(one, model=replace(one.model, optimizer="adam"))
    assert measurable(adam, 2).optimizer == "adam" and measurable(one, 2).optimizer == "sgd"


def test_points_that_score_are_others_than_those_that_train() -> None:
    train, test = lookup_points(0), lookup_points(1)
    for name in ("embedding_bag", "sparse_update"):
        assert len(set(train[name][:500]) & set(test[name][:500])) < 10
        assert {stream_kind(p) for p in test[name][:200]} == set(KINDS)
    assert {p.op for p in train["embedding_bag"][:200]} == set(embedding_bag.OPS)


def test_dense_parts_and_messages_have_points() -> None:
    dense = dense_points(0)
    assert {"gemm", "elementwise", "host"} <= set(dense)
    assert any(p.op in ("copy_", "clone") for p in dense["elementwise"])
    assert {p.op for p in message_points(0)["collective"]} == {"all_to_all", "all_reduce"}


def test_scores_by_hand() -> None:
    """Forecasts of 110 and 90 us; measured 100 and 100, then 121 and 100."""
    rows = pd.DataFrame(
        {"first_us": [100.0, 100.0], "second_us": [121.0, 100.0], "forecast_us": [110.0, 90.0]}
    )
    found = score("x", rows)
    assert found.errors["mape_pct"] == pytest.approx(5.0)  # 0 of sqrt(100 * 121), 10
    assert found.retest["mape_pct"] == pytest.approx(10.5)


def test_there_are_eight_sharders() -> None:
    model = candidate("a").model
    names = [c.name for c in sharders(BENCH.forecaster(model), np.random.default_rng(0))]
    assert len(names) == len(set(names)) == 8


def test_candidates_are_measured_by_real_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model = any_configuration(rng)
    small = replace(model, batch=8, tables=tuple(replace(t, rows=90) for t in model.tables[:3]))
    mixed = Candidate(name="mixed", model=small, sharding=any_sharding(rng, small, 2))
    assert {s.table for s in measurable(mixed, 2).shards} == {0, 1, 2}
    seen: list[int] = []
    wanted = [candidate("a"), mixed, candidate("b")]  # a and b are the same sharding
    rounds = measure(wanted, 2, 1, tmp_path, 3, 100.0, seen.append)
    assert (
        len(rounds) == 3
        and rounds[0] is rounds[2]
        and all(len(r.rounds_us) == ROUNDS for r in rounds)
    )
    assert all(r.stages_us.shape == (2, len(STAGES)) and r.stages_us.min() >= 0 for r in rounds)
    assert all(r.stages_us.sum(axis=1).max() <= 3 * max(r.rounds_us) for r in rounds)
    assert seen[-1] == 2 * ROUNDS


def test_torchrec_is_measured_on_what_torch_is() -> None:
    """Pairs of one model and sharding, with optimizers that FBGEMM has on a CPU."""
    candidates = by_both_libraries(3, 2, seed=0)
    assert [c.library for c in candidates] == 3 * ["torch", "torchrec"]
    for ours, theirs in zip(candidates[::2], candidates[1::2], strict=True):
        assert replace(ours, library="torchrec") == theirs
        assert ours.model.optimizer in TORCHREC_OPTIMIZERS
        assert measurable(theirs, 2) == replace(measurable(ours, 2), library="torchrec")


def test_the_table_of_both_libraries_by_hand() -> None:
    times_us = {"torch": 10e3, "torchrec": 12.5e3}
    ours, theirs = (
        Judged(candidate=replace(candidate("a"), library=x), forecast_us=9e3, rounds_us=(us,))
        for x, us in times_us.items()
    )
    table = libraries_table([(ours, theirs)], 2)
    shown = [next(iter(column.cells)) for column in table.columns]
    assert shown == ["2", "4", "sgd", "9.0", "10.0", "12.5", "1.25"]
