"""The replay of a sweep in another order, on pools small enough to count."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from itercast.eval.active import (
    Pass,
    Pool,
    at_random,
    markdown,
    minutes_for,
    passes,
    plot,
    replay,
    row_cost_s,
)
from itercast.eval.tracking.logs import log_active
from itercast.learners.models.training_table import Table

POINTS = 60


def pool(name: str, cost_s: float) -> Pool:
    """Sixty points and ten rows held out; time grows with the only feature."""
    x = np.random.default_rng(0).random((POINTS + 10, 1)).astype(np.float32)
    ids, ones = np.arange(len(x)), np.ones(len(x))
    return Pool(
        name=name,
        table=Table(x=x, roofline_us=ones, time_us=np.exp(3 * x[:, 0]), group=ids),
        ids=ids,
        cost_s=cost_s * ones,
        cost_of=dict.fromkeys(range(len(x)), cost_s),
        held=np.arange(POINTS, POINTS + 10),
        left=list(range(POINTS)),
    )


def one(minutes: float, error: float) -> Pass:
    return Pass(minutes=minutes, points=1, median_ape_pct=error, p90_ape_pct=2 * error)


def test_a_random_sweep_shares_time_evenly() -> None:
    """Points of b take twice as long: a gets two for each of b's."""
    pools = [pool("a", 1.0), pool("b", 2.0)]
    order = []
    for own, point in islice(at_random(pools), 9):
        own.take(point)
        order.append(own.name)
    assert order.count("a") == 6 and order.count("b") == 3


@pytest.mark.parametrize("strategy", ["random", "active"])
def test_a_replay_spends_what_it_says_and_gets_better(strategy: str) -> None:
    """120 and 60 s of points; passes end after 22.5, 45 and 90 s."""
    pools = [pool("a", 2.0), pool("b", 1.0)]
    found = replay(pools, strategy, passes(pools))
    assert [p.minutes for p in found] == pytest.approx([3 / 8, 3 / 4, 3 / 2])
    assert 90 <= sum(p.spent_s for p in pools) < 92
    assert all(len(set(p.taken)) == len(p.taken) for p in pools)
    assert all(not set(p.taken) & set(p.left) for p in pools)
    assert found[-1].points == sum(len(p.taken) for p in pools)
    assert found[-1].median_ape_pct < found[0].median_ape_pct


def test_ten_minutes_are_a_pass_where_there_is_more() -> None:
    assert passes([pool("a", 12.0)])[-1] == 10.0  # of 12 minutes; their half is 6


def test_minutes_until_an_error_are_read_off_the_curve() -> None:
    curve = [one(1, 8.0), one(4, 2.0)]
    assert minutes_for(curve, 5.0) == pytest.approx(2.0)  # half way, and 2 = sqrt(1 * 4)
    assert np.isnan(minutes_for(curve, 1.0))


def test_what_rows_do_not_tell_a_chunk_would_take() -> None:
    """100 us: ten samples are 1 ms; 10 ms: no less than three."""
    rows = pd.DataFrame({"time_us": [100.0, 10_000.0]})
    assert row_cost_s(rows) == pytest.approx([0.021, 0.05])
    assert row_cost_s(rows.assign(cost_s=[1.0, 2.0])) == pytest.approx([1.0, 2.0])


def test_the_report_is_a_table_a_plot_and_a_run(mlflow_store: str, tmp_path: Path) -> None:
    found = {"random": [one(1, 8.0), one(4, 4.0)], "active": [one(1, 8.0), one(4, 2.0)]}
    text = markdown("x", found, 3)
    assert "| 4.00 | 1 | 4.0 | 8.0 | 1 | 2.0 | 4.0 |" in text
    assert "active reaches random's median of 4.00 minutes after 2.52 minutes" in text  # 4 ** (2/3)
    assert len(plot("x", found).axes[0].lines) == 4
    (tmp_path / "report").mkdir()
    log_active("x", {"active": [{"minutes": 2.0, "median_ape_pct": 3.0}]}, tmp_path / "report")
    import mlflow

    runs = mlflow.search_runs(search_all_experiments=True)
    assert runs["metrics.median_ape_pct"].max() == 3.0
