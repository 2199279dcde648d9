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
    """For each of LEVELS, the share of measurements in % that intervals of that level cover.

    All arrays are times in us by measurement; ``p10`` and ``p90`` bound the interval of STATED.
    Those of another level are as wide as of a log-normal time: log(end / predicted) is multiplied
    by z(level) / z(STATED).
    """
    error = np.log(measured / predicted)
    width_above = np.log(np.maximum(p90, SMALLEST) / predicted)
    width_below = np.log(predicted / np.maximum(p10, SMALLEST))
    width = np.maximum(np.where(error > 0, width_above, width_below), SMALLEST)
    needed_stretch = np.abs(error) / width
    stretches = norm.ppf(0.5 + np.array(LEVELS) / 2) / norm.ppf(0.5 + STATED / 2)
    # a measurement at the very end counts as covered, whatever the last digit is
    return [float(100 * np.mean(needed_stretch <= s * (1 + SMALLEST))) for s in stretches]


def at_stated(covered_pct: Sequence[float]) -> float:
    """The coverage in % at the stated level."""
    return covered_pct[LEVELS.index(STATED)]
