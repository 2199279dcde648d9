"""A Gaussian process along curves: what it carries on, what it shrugs off, what it keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from learners.blend import cross_fit, refit
from learners.fit import Table, default_options
from learners.process import Process, fit_process, merged
from learners.table import identities
from microbench.ops import families

CURVE = {0: (4.0, 24.0, 2.0), 1: (4.0, 1.0, 1.0)}


def points(sizes: np.ndarray, offset: float, who: float) -> tuple[np.ndarray, np.ndarray]:
    """A curve that saturates with size, some way above or below another's."""
    return np.c_[sizes, np.full(len(sizes), who)], offset + 2 / (1 + np.exp((sizes - 20) / 2))


def test_a_curve_carries_on_as_its_neighbour_did() -> None:
    """One curve is known to 2^29, the other, a third higher, to 2^24 only."""
    long, short = points(np.arange(10.0, 30), 0.0, 0), points(np.arange(10.0, 25), 0.3, 1)
    x, y = np.concatenate([long[0], short[0]]), np.concatenate([long[1], short[1]])
    beyond, truth = points(np.arange(25.0, 30), 0.3, 1)
    found = fit_process(x, y, CURVE).predict(beyond)
    assert np.abs(found - truth).max() < 0.1
    assert np.abs(short[1][-1] - truth).max() > 0.2  # staying level would be worse


def test_a_single_stray_measurement_counts_little() -> None:
    x, y = points(np.arange(10.0, 30), 0.0, 0)
    spoiled = y.copy()
    spoiled[10] += 1.0
    kernel = fit_process(x, y, CURVE).kernel
    kept = fit_process(x, spoiled, CURVE, kernel).predict(x[10:11])[0]
    assert abs(kept - y[10]) < 0.2


def test_points_close_together_are_one() -> None:
    """10.0 and 10.1 octaves are one point at 10.05 with the median of both, 11 another."""
    z = np.array([[10.0], [10.1], [11.0]])
    at, value, count = merged(z, np.array([1.0, 2.0, 5.0]))
    found = sorted(zip(at[:, 0].tolist(), value.tolist(), count.tolist(), strict=True))
    assert found == [pytest.approx((10.05, 1.5, 2.0)), pytest.approx((11.0, 5.0, 1.0))]


def test_a_process_is_the_same_after_a_round_trip() -> None:
    x, y = points(np.arange(10.0, 30), 0.0, 0)
    first = fit_process(x, y, CURVE)
    second = Process.from_arrays(first.to_arrays())
    assert second.predict(x) == pytest.approx(first.predict(x), abs=1e-4)


def test_what_crosses_a_network_is_known_by_its_cluster() -> None:
    common = {"gpu": "h100-sxm-80gb", "op": "all_reduce", "message_bytes": 2**20}
    rows = pd.DataFrame(
        [
            {**common, "world_size": 8, "ranks_per_node": 8, "node": "dgx-h100"},
            {**common, "world_size": 16, "ranks_per_node": 8, "node": "aws-p5"},
            {**common, "world_size": 16, "ranks_per_node": 8, "network_bytes_per_s": 5e10},
        ]
    )
    found = identities(rows, families()["collective"], {})["gpu"].tolist()
    one = "h100-sxm-80gb"
    assert found == [one, f"{one} over aws-p5", f"{one} over 50000000000.0"]


def test_a_kind_held_out_while_learning_counts_in_the_end() -> None:
    """A kind of op that only the last rows are of keeps its own level, here a factor of e."""
    rng = np.random.default_rng(0)
    size = rng.uniform(4, 20, 60)
    rare = np.arange(60) >= 54
    table = Table(
        x=np.c_[size, rare, ~rare].astype(np.float32),
        roofline_us=np.ones(60),
        time_us=np.exp(0.1 * size + rare),
        group=np.arange(60).astype(str),
    )
    crossed = cross_fit(table.take(np.arange(54)), default_options(table))
    blend = refit(table, default_options(table), replace(crossed, share=1.0))
    found = blend.predict(table.x[54:], np.ones(6), np.zeros(6, dtype=bool))
    assert found == pytest.approx(table.time_us[54:], rel=0.1)
