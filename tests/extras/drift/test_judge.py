"""Sign tests of measured over forecast times, counted by hand."""

import numpy as np
import pytest

from itercast.extras.drift.judge import (
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


JUDGED = [
    # all of 8 points beyond the margin of 10 %: p = 2 / 2**8 < 1 %
    (family(*[1.9, 2.0, 2.1, 2.0] * 2), 2 / 256, True),
    (family(*[0.5] * 8), 2 / 256, True),
    # one of eight on the other side: seven or more of eight are 9/256, twice that both ways
    (family(*[2.0] * 7, 0.9), 18 / 256, False),
    # 9 % slow where the bundle is off by 10 % anyway; at 11 % they have drifted
    (family(*[1.09] * 20), 1.0, False),
    (family(*[1.11] * 20), 2 / 2**20, True),
    # where points measured twice differ by 30 %, 20 % says nothing
    (family(*[1.2] * 20, retest_pct=30.0), 1.0, False),
    (family(*[5.0] * 7), None, None),  # seven unanimous points: 2 / 2**7 is never below 1 %
]


@pytest.mark.parametrize(("points", "p_value", "drifted"), JUDGED)
def test_families_by_hand(points: Compared, p_value: float | None, drifted: bool | None) -> None:
    found = judge_family("gemm", points, 0.01)
    assert found.drifted is drifted and found.points == len(points.log_ratios)
    assert found.ratio == pytest.approx(np.exp(np.median(points.log_ratios)))
    assert p_value is None or found.p_value == pytest.approx(p_value)
    assert found.margin_pct == max(10.0, points.retest_pct or 0.0)
    assert points_needed(0.01) == 8


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
