"""How many measurements intervals cover, at the nominal 80 % and at other levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

STATED = 0.8  # level of the intervals that forecasts give: from the 10 to the 90 % quantile
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SMALLEST = 1e-9  # a lower end of 0 has no logarithm


def coverage_pct(
    measured: np.ndarray, predicted: np.ndarray, p10: np.ndarray, p90: np.ndarray
) -> list[float]:
    """Share of measurements in % that the interval of each of LEVELS covers.

    At another level than STATED both ends move in log time as those of a normal distribution do:
    log(end / predicted) is multiplied by z(level) / z(STATED).
    """
    off = np.log(measured / predicted)
    up = np.log(np.maximum(p90, SMALLEST) / predicted)
    down = np.log(predicted / np.maximum(p10, SMALLEST))
    room = np.maximum(np.where(off > 0, up, down), SMALLEST)
    needed = np.abs(off) / room  # by how much the interval has to be stretched to cover it
    stretch = norm.ppf(0.5 + np.array(LEVELS) / 2) / norm.ppf(0.5 + STATED / 2)
    # equal ends count as covered, whatever the last digit is
    return [float(100 * np.mean(needed <= s * (1 + SMALLEST))) for s in stretch]


def at_stated(covered_pct: Sequence[float]) -> float:
    """The coverage in % at the stated level."""
    return covered_pct[LEVELS.index(STATED)]
