"""Judges by sign tests whether measured times still agree with a bundle's forecasts.

A point's ratio is measured / forecast, at the machine's reference speed. A family has drifted where
its median ratio lies outside [1 / (1 + margin), 1 + margin]; the margin is the median error of the
bundle on held-out shapes, or the median difference of two measurements of a point if that is more.

Sign test: if the median is within the margin, each of n points lies above the upper limit with a
chance of at most one half, like heads of a coin; likewise below the lower limit. A family is called
drifted where so many points beyond a limit are too unlikely. The chance of calling any family
drifted that is not is at most FALSE_ALARM in all (Bonferroni over families and both limits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

FALSE_ALARM = 0.01  # of a check, over all families


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A family's points: log(measured / forecast) of each, and the errors to expect in %.

    ``held_out_pct``: the bundle's median error on held-out shapes. ``retest_pct``: the median
    difference of points measured twice in this check, None where none was.
    """

    log_ratios: np.ndarray
    held_out_pct: float
    retest_pct: float | None = None

    @property
    def margin_pct(self) -> float:
        """How far the median ratio may lie from 1."""
        return max(self.held_out_pct, self.retest_pct or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDrift:
    """The verdict on a family; ``drifted`` is None where it has too few points to be judged.

    ``ratio``: median of measured / forecast, ``ratio_p10`` and ``ratio_p90`` its spread over
    points. ``p_value``: chance of so many points beyond the margin on one side, if the bundle fits.
    """

    family: str
    points: int
    ratio: float
    ratio_p10: float
    ratio_p90: float
    margin_pct: float
    held_out_pct: float
    retest_pct: float | None
    p_value: float
    drifted: bool | None


def judge(compared: Mapping[str, Compared]) -> list[FamilyDrift]:
    """Judges each family; the chance of any false alarm among them is FALSE_ALARM at most."""
    level = FALSE_ALARM / max(1, len(compared))
    return [
        judge_family(name, points_of_family, level) for name, points_of_family in compared.items()
    ]


def judge_family(name: str, compared: Compared, level: float) -> FamilyDrift:
    """Judges one family; the chance of a false alarm is at most ``level``."""
    logs, limit = compared.log_ratios, float(np.log1p(compared.margin_pct / 100))
    p_value = min(1.0, 2 * min(sign_test(logs > limit), sign_test(logs < -limit)))
    low, middle, high = np.exp(np.quantile(logs, [0.1, 0.5, 0.9]))
    enough = len(logs) >= points_needed(level)
    return FamilyDrift(
        family=name,
        points=len(logs),
        ratio=float(middle),
        ratio_p10=float(low),
        ratio_p90=float(high),
        margin_pct=compared.margin_pct,
        held_out_pct=compared.held_out_pct,
        retest_pct=compared.retest_pct,
        p_value=p_value,
        drifted=p_value <= level if enough else None,
    )


def sign_test(beyond: np.ndarray) -> float:
    """Chance that of ``len(beyond)`` fair coins at least ``sum(beyond)`` show heads."""
    return float(binom.sf(int(beyond.sum()) - 1, len(beyond), 0.5))


def points_needed(level: float) -> int:
    """Least n of points for a verdict: even if all n lie beyond a limit, 2 * 2**-n <= level."""
    return int(np.ceil(np.log2(2 / level)))
