"""Intervals of iterations: sums of correlated errors by hand, and their laws."""

from __future__ import annotations

from math import exp, log

import pytest

from itercast.compose.intervals import correlated_errors
from itercast.compose.intervals.correlated_errors import (
    ASSUMED,
    BETWEEN,
    SHARED,
    WITHIN,
    OpErrors,
    interval,
)
from itercast.compose.predict import predict
from itercast.compose.pricing.price_book import PricedOp
from itercast.learners.bundle import SHIPPED, Bundle

WIDE = 0.2  # half width of the error of each op here


def op(
    us: float, family: str = "gemm", seen: bool = True, below: float = WIDE, above: float = WIDE
) -> PricedOp:
    """An op whose log error is within [-below, above] with 80 % probability."""
    return PricedOp(
        op="x",
        family=family,
        phase="forward",
        duration_us=us,
        low_us=us * exp(-below),
        high_us=us * exp(above),
        flops=0,
        in_envelope=seen,
    )


def widths(*ops: PricedOp, times: float = 1.0) -> tuple[float, float]:
    """Half widths of an iteration that computes these ops, each ``times`` times."""
    errors = OpErrors()
    for one in ops:
        errors.add(one, times)
    total_us = times * sum(one.duration_us for one in ops)
    return errors.half_widths(1 / total_us, 0.0)


def test_two_ops_of_a_family_by_hand() -> None:
    """Shares of 1/4 and 3/4: S = 0.2, Q = 0.05**2 + 0.15**2 = 0.025."""
    rho = WITHIN["unseen"]
    below, above = widths(op(10, seen=False), op(30, seen=False))
    assert below == pytest.approx((rho * 0.2**2 + (1 - rho) * 0.025) ** 0.5)
    assert above == pytest.approx(below)


def test_two_families_by_hand() -> None:
    """Half of the time each: S = Q**0.5 = 0.1 of each, common errors between them."""
    rho = BETWEEN["unseen"]
    below, _ = widths(op(10, seen=False), op(10, "norm", seen=False))
    assert below == pytest.approx((rho * 0.2**2 + (1 - rho) * 2 * 0.1**2) ** 0.5)


def test_both_sides_have_their_own_width() -> None:
    assert widths(op(10, below=0.1, above=0.3)) == pytest.approx((0.1, 0.3))


def test_equal_calls_have_one_error() -> None:
    """A hundred equal ops are as uncertain as one: nothing averages out."""
    assert widths(*[op(10)] * 100) == pytest.approx((WIDE, WIDE))
    assert widths(op(10), times=100) == pytest.approx((WIDE, WIDE))


def test_independent_errors_average_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """n ops of equal length, to a relative 1e-9: width / sqrt(n)."""
    monkeypatch.setattr(correlated_errors, "WITHIN", {"seen": 0.0, "unseen": 0.0})
    monkeypatch.setattr(correlated_errors, "BETWEEN", {"seen": 0.0, "unseen": 0.0})
    for n in (1, 4, 100):
        ops = [op(10 * (1 + 1e-9 * i)) for i in range(n)]
        assert widths(*ops)[0] == pytest.approx(WIDE / n**0.5)


def test_perfectly_correlated_errors_do_not_average_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlated_errors, "WITHIN", {"seen": 1.0, "unseen": 1.0})
    monkeypatch.setattr(correlated_errors, "BETWEEN", {"seen": 1.0, "unseen": 1.0})
    ops = [op(10 + i, family) for i in range(20) for family in ("gemm", "norm")]
    assert widths(*ops)[0] == pytest.approx(WIDE)


def test_more_ops_are_relatively_more_certain() -> None:
    """With the measured correlations too; down to the common part of a family's errors."""
    found = [widths(*[op(10 + i, seen=False) for i in range(n)])[0] for n in (1, 2, 8, 64, 1000)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(WIDE * WITHIN["unseen"] ** 0.5, rel=0.01)


def test_errors_outside_the_envelope_average_out_less() -> None:
    seen, unseen = (
        widths(*[op(10 + i, seen=kind) for i in range(50)])[0] for kind in (True, False)
    )
    assert unseen > 2 * seen


def test_hidden_messages_add_nothing() -> None:
    errors = OpErrors()
    errors.add(op(10), 1)
    alone = errors.half_widths(0.1, 0.0)
    errors.add(op(50, "collective"), 1, on_comm=True)
    assert errors.half_widths(0.1, 0.0) == pytest.approx(alone)
    assert errors.half_widths(0.1, 0.1)[0] > alone[0]


def test_an_interval_by_hand() -> None:
    """Independent parts add in squares: ops, host, what is common, and what is assumed."""
    low, high = interval(100.0, (0.3, 0.4), (0.0, 0.2), 0.5, "gpu")
    common = SHARED["gpu"] ** 2 + (0.5 * ASSUMED) ** 2
    assert log(100 / low) == pytest.approx((0.3**2 + common) ** 0.5)
    assert log(high / 100) == pytest.approx((0.4**2 + 0.2**2 + common) ** 0.5)


def test_more_assumptions_widen_it() -> None:
    found = [interval(100.0, (0.1, 0.1), (0.0, 0.0), frac, "gpu") for frac in (0.0, 0.3, 1.0)]
    lows, highs = zip(*found, strict=True)
    assert list(lows) == sorted(lows, reverse=True)
    assert list(highs) == sorted(highs)
    assert len(set(highs)) == 3


@pytest.fixture(scope="module")
def relative_widths() -> dict[str, float]:
    """p90 / p10 of one training step on GPUs with rows in the shipped bundle, and without."""
    found = {}
    for gpu in ("a100-sxm-80gb", "h100-sxm-80gb", "l40s", "rtx-4090"):
        told = predict("gpt2-small", gpu=gpu, dtype="bf16", batch=32, engine="graph")
        assert told.iteration_us_p10 < told.iteration_us < told.iteration_us_p90
        found[gpu] = told.iteration_us_p90 / told.iteration_us_p10
    return found


def test_gpus_that_were_not_measured_are_less_certain(relative_widths: dict[str, float]) -> None:
    known = Bundle.load(SHIPPED).gpus
    measured = [w for gpu, w in relative_widths.items() if gpu in known]
    others = [w for gpu, w in relative_widths.items() if gpu not in known]
    assert len(measured) == len(others) == 2
    assert max(measured) < min(others)
