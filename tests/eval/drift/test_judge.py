"""Sign tests of measured over forecast times, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from itercast.eval.drift.judge import (
    FALSE_ALARM,
    Compared,
    judge,
    judge_family,
    points_needed,
    sign_test,
)


def family(*ratios: float, held_out_pct: float = 10.0, retest_pct: float | None = None) -> Compared:
    """Points of a family by measured / forecast."""
    return Compared(log_ratios=np.log(ratios), held_out_pct=held_out_pct, retest_pct=retest_pct)


def test_chance_of_heads() -> None:
    """Three of three tosses: 1/8; two or three: 4/8; none or more: certain."""
    assert sign_test(np.array([True, True, True])) == pytest.approx(1 / 8)
    assert sign_test(np.array([True, False, True])) == pytest.approx(4 / 8)
    assert sign_test(np.array([False, False, False])) == 1.0


def test_a_family_twice_as_slow_has_drifted() -> None:
    """All of 8 points beyond the margin of 10 %: p = 2 / 2**8 < 1 %; the median is 2."""
    found = judge_family("gemm", family(*[1.9, 2.0, 2.1, 2.0] * 2), 0.01)
    assert found.p_value == pytest.approx(2 / 256)
    assert (found.drifted, found.points) == (True, 8)
    assert found.ratio == pytest.approx(2.0)
    faster = judge_family("gemm", family(*[0.5] * 8), 0.01)
    assert faster.drifted
    assert faster.p_value == pytest.approx(2 / 256)


def test_one_point_of_eight_on_the_other_side_is_not_enough() -> None:
    """Seven or more of eight: 9/256, twice that for two directions."""
    found = judge_family("gemm", family(*[2.0] * 7, 0.9), 0.01)
    assert found.p_value == pytest.approx(18 / 256)
    assert found.drifted is False


def test_errors_within_the_margin_are_no_drift() -> None:
    """All points are 9 % slow, the bundle is off by 10 % anyway; at 11 % they have drifted."""
    assert judge_family("gemm", family(*[1.09] * 20), 0.01).drifted is False
    assert judge_family("gemm", family(*[1.11] * 20), 0.01).drifted is True


def test_noise_of_now_widens_the_margin() -> None:
    """Where points measured twice differ by 30 %, 20 % says nothing."""
    assert judge_family("gemm", family(*[1.2] * 20), 0.01).drifted is True
    noisy = judge_family("gemm", family(*[1.2] * 20, retest_pct=30.0), 0.01)
    assert (noisy.drifted, noisy.margin_pct) == (False, 30.0)


def test_too_few_points_are_not_judged() -> None:
    """Seven unanimous points have 2 / 2**7 = 1.6 %: never below 1 %."""
    assert points_needed(0.01) == 8
    assert judge_family("gemm", family(*[5.0] * 7), 0.01).drifted is None


def test_more_families_need_stronger_evidence() -> None:
    """8 points: 0.8 % is below 1 %, not below a tenth of it."""
    one = {"gemm": family(*[2.0] * 8)}
    many = {**one, **{f"other {i}": family(*[1.0] * 8) for i in range(9)}}
    assert [f.drifted for f in judge(one)] == [True]
    assert judge(many)[0].drifted is None  # 1 % / 10 needs 11 points


def test_false_alarms_are_as_rare_as_stated() -> None:
    """2000 checks of five families of 15 points that fit: at most 1 % call one of them drifted."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(2000):
        fits = {
            str(i): Compared(log_ratios=rng.normal(0, 0.3, 15), held_out_pct=0.0) for i in range(5)
        }
        alarms += any(f.drifted for f in judge(fits))
    assert alarms / 2000 <= FALSE_ALARM * 1.5  # 1.5: of a count around 20
