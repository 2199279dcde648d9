"""Times on a machine that changes speed, brought to one speed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from itercast.learners.features.machine_speed import (
    Speed,
    at_reference_us,
    iterations_at_reference_us,
    learn_speed,
    reference_anchors,
    retest_ape_pct,
    undisturbed,
)
from itercast.microbench.ops import families

GEMM = families()["gemm"]
ANCHORS = {("cpu", 2): (100.0, 20.0)}


def rows(
    times: list[float], anchors: list[float], serial: list[float], **more: object
) -> pd.DataFrame:
    return pd.DataFrame(
        {"time_us": times, "anchor_us": anchors, "serial_us": serial, "gpu": "cpu", "threads": 2}
    ).assign(**more)


def test_references_are_medians_and_the_product_stands_for_missing_views() -> None:
    table = rows([1.0] * 3, [90.0, 100.0, 130.0], [10.0, 20.0, np.nan])
    assert reference_anchors({"gemm": table}) == {("cpu", 2): (100.0, 20.0)}  # of 10, 20, 130


def test_long_ops_follow_the_product_short_ones_the_views() -> None:
    """Twice as slow on all threads, four times on one; 100 us runs half in parallel."""
    speed = Speed(anchors=ANCHORS, sensitivity=(1.0, 1.0))
    both = rows([100.0, 1e9, 1e-4], [200.0] * 3, [80.0] * 3)
    found = at_reference_us(both, speed)
    assert found == pytest.approx([100 / (2**0.5 * 4**0.5), 1e9 / 2, 1e-4 / 4], rel=1e-4)


def test_rows_taken_while_others_had_the_machine_are_left_out() -> None:
    """Of a slow state (2.4 times) and a stolen machine (four times, on either anchor) one stays."""
    table = rows([1.0, 2.0, 3.0], [240.0, 400.0, 100.0], [20.0, 20.0, 80.0])
    assert undisturbed(table, ANCHORS)["time_us"].tolist() == [1.0]


def test_how_much_a_family_follows_is_learned_from_points_measured_twice() -> None:
    """Sixty long products: the second time the anchor doubles and the op takes 2^0.3 as long."""
    m = np.arange(1, 61)
    sizes = {"m": m, "n": 1, "k": 1, "cache": "warm"}
    first = rows([1e6] * 60, [100.0] * 60, [20.0] * 60, **sizes, repeat=0)
    again = rows([1e6 * 2**0.3] * 60, [200.0] * 60, [20.0] * 60, **sizes, repeat=1)
    table = pd.concat([first, again], ignore_index=True)
    speed = learn_speed(table, GEMM, ANCHORS)
    assert speed.sensitivity == pytest.approx((0.3, 0.75), abs=0.02)
    floor = retest_ape_pct(table, GEMM, speed)
    assert floor is not None and floor < 2  # 23 % before


def test_an_iteration_is_corrected_by_what_it_consists_of() -> None:
    """Half in one long op that follows the product by 0.5, half in host events that follow views.

    The product takes 4 times as long as usual: 4^(0.5 * 0.5) of the time is the machine's.
    """
    measured = rows([1e6], [400.0], [20.0])
    [found] = iterations_at_reference_us(
        measured,
        ANCHORS,
        {"gemm": 5e8, "host": 5e8},
        {"gemm": 1, "host": 10**9},
        {"gemm": (0.5, 0.0), "host": (0.0, 1.0)},
    )
    assert found == pytest.approx(1e6 / 4**0.25, rel=0.01)
    [same] = iterations_at_reference_us(measured, {}, {"gemm": 1.0}, {}, {})
    assert same == 1e6
