"""Judging forecasts of recommendation models: choices and errors by hand, real ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from itercast.extras.lookups import embedding_bag
from itercast.extras.recommenders import sharding_worker
from itercast.extras.recommenders.judge import (
    Bench,
    Choice,
    Judged,
    choices,
    correlations,
    error_statistics,
)
from itercast.extras.recommenders.measure import ROUNDS, measurable, measure
from itercast.extras.recommenders.points import dense_points, lookup_points, message_points
from itercast.extras.recommenders.tables.placement import Placement
from itercast.extras.recommenders.tasks import (
    Candidate,
    any_configuration,
    any_sharding,
    unequal_task,
)
from itercast.learners.bundle import SHIPPED_CPU

BENCH = Bench(ranks=2, bundle=SHIPPED_CPU, out=Path())


def candidate(name: str, rank: int = 0) -> Candidate:
    model = unequal_task(np.random.default_rng(0))
    small = replace(model, batch=4, tables=tuple(replace(t, rows=50) for t in model.tables[:2]))
    place = Placement("table_wise", (rank,))
    return Candidate(name=name, model=small, sharding=(place, place))


def test_errors_and_retest_by_hand() -> None:
    judged = [
        Judged(candidate=candidate("a"), forecast_us=110.0, rounds_us=(100.0, 100.0)),
        Judged(candidate=candidate("b"), forecast_us=90.0, rounds_us=(100.0, 121.0)),
    ]
    found = error_statistics(judged)
    assert judged[1].measured_us == pytest.approx(110.0)
    assert found["mape_pct"] == pytest.approx((10 + 100 * 20 / 110) / 2)
    assert found["noise_floor_pct"] == pytest.approx(21 / 2)  # median of 0 and 21


def test_choices_by_hand() -> None:
    """Forecasts prefer b, which is 5 % slower than a; torchrec's formulas see no difference."""
    crowded, spread = candidate("a", 1), candidate("b", 0)
    task = [
        Judged(candidate=crowded, forecast_us=120.0, rounds_us=(100.0,)),
        Judged(candidate=spread, forecast_us=110.0, rounds_us=(105.0,)),
    ]
    by_name = {c.name: c for c in choices([task], BENCH)}
    assert by_name["itercast"].means == pytest.approx([0.05])
    assert by_name["random pick"].means == pytest.approx([0.025])
    assert by_name["random pick"].fastest == 0.5
    assert by_name["itercast"].successes == 1 and by_name["itercast"].fastest == 0
    assert Choice(name="x", regrets=((0.0, 0.11), (0.11,))).successes == 0.5


def test_a_choice_by_one_round_is_judged_by_the_next() -> None:
    """a is faster at first, and 20 % slower than b in the second round."""
    task = [
        Judged(candidate=candidate("a"), forecast_us=1.0, rounds_us=(90.0, 120.0)),
        Judged(candidate=candidate("b"), forecast_us=2.0, rounds_us=(100.0, 100.0)),
    ]
    by_name = {c.name: c for c in choices([task], BENCH)}
    assert by_name["measuring once"].means == pytest.approx([0.2])


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


def test_the_model_s_optimizer_is_measured() -> None:
    one = candidate("a")
    adam = replace(one, model=replace(one.model, optimizer="adam"))
    assert measurable(adam, 2).optimizer == "adam" and measurable(one, 2).optimizer == "sgd"


def test_all_parts_of_an_iteration_have_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups with streams of all kinds, copies, products, host events and messages."""
    monkeypatch.setattr("itercast.extras.recommenders.points.MODELS", 2)
    lookups = lookup_points()
    assert {p.op for p in lookups["embedding_bag"][:200]} == set(embedding_bag.OPS)
    kinds = {(p.skew > 0, p.repeats > 0, p.reuse != "") for p in lookups["sparse_update"][:200]}
    assert len(kinds) == 4  # uniform, Zipf, as a trace, by histogram
    dense = dense_points()
    assert {"gemm", "elementwise", "host"} <= set(dense) and not set(lookups) & set(dense)
    assert any(p.op == "nonzero" for p in dense["index"])  # of tables cut by rows
    tasks = [unequal_task(np.random.default_rng(seed)) for seed in range(30)]
    widths = {t.dim for task in tasks for t in task.tables}
    assert widths <= {p.dim for p in lookups["sparse_update"]}
    assert any(p.op in ("copy_", "clone") for p in dense["elementwise"])
    assert {p.op for p in message_points()["collective"]} == {"all_to_all", "all_reduce"}


def test_a_step_that_is_not_timed_goes_ahead_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn is not counted, two are; each model has its own step in the caches when timed."""
    ran: list[str] = []
    monkeypatch.setattr(
        sharding_worker, "ShardedStep", lambda name, group: lambda: ran.append(name)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models: Any = ["a", "b"]
        lines = list(sharding_worker.in_turn(models, 2, dist.group.WORLD))
    finally:
        dist.destroy_process_group()
    assert ran == 3 * ["a", "a", "b", "b"]
    assert [len(line["times_us"]) for line in lines] == [2, 2]


@pytest.mark.slow
def test_candidates_are_measured_by_real_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model = any_configuration(rng)
    small = replace(model, batch=8, tables=tuple(replace(t, rows=90) for t in model.tables[:3]))
    mixed = Candidate(name="mixed", model=small, sharding=any_sharding(rng, small, 2))
    assert {s.table for s in measurable(mixed, 2).shards} == {0, 1, 2}
    seen: list[int] = []
    wanted = [candidate("a"), mixed, candidate("b")]  # a and b are the same sharding
    first, other, again = measure(wanted, 2, tmp_path, 3, 100.0, seen.append)
    assert first == again and len(first) == len(other) == ROUNDS
    assert seen[-1] == 2 * ROUNDS
