"""Which differences of forecast errors are real, and which are within the noise.

The noise of a median error comes from the points that happened to be measured, and from measuring:
both are drawn again, and the spread of the result is the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.slow_imports import pd
from itercast.learners.models.training_table import Array

RESAMPLES = 200
LEVELS = (0.025, 0.975)  # of differences: what lies between is noise
FEWEST = 10  # shapes; with fewer, no difference counts as real
RETEST_SIGMAS = 0.954  # median |difference| of two equally noisy values, in their own sigmas


def ape_pct(log_error: Array) -> Array:
    """Absolute error in % of forecasts whose log(measured / forecast) is given."""
    return 100 * np.abs(np.exp(-log_error) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Medians:
    """Median absolute errors in % by forecaster (a learner or a bundle).

    ``drawn``: those of each of RESAMPLES resamples (rows). ``shapes``: how many were measured.
    """

    pct: Mapping[str, float]
    drawn: pd.DataFrame
    shapes: int

    def interval_pct(self, first: str, second: str) -> tuple[float, float] | None:
        """LEVELS quantiles of the second's median error minus the first's; None if too few."""
        if self.shapes < FEWEST:
            return None
        low, high = np.quantile(self.drawn[second] - self.drawn[first], LEVELS)
        return float(low), float(high)

    def better(self, first: str, second: str) -> bool:
        """Whether the first has the smaller median error beyond the noise."""
        return (self.interval_pct(first, second) or (0.0, 0.0))[0] > 0

    def ranks(self) -> dict[str, int]:
        """Rank of each forecaster: 1 + how many others are better beyond the noise."""
        return {name: 1 + sum(self.better(other, name) for other in self.pct) for name in self.pct}


def medians(
    log_errors: Mapping[str, Array], shape: Array, retest_ape_pct: float | None = None
) -> Medians:
    """Median errors of several forecasts of the same measured points.

    ``log_errors``: log(measured / forecast) by forecaster. A resample draws shapes with all their
    points, and moves measured times by the noise that the ``retest_ape_pct`` of them shows.
    """
    names, errors = list(log_errors), np.stack([*log_errors.values()])
    codes = pd.factorize(np.asarray(shape))[0]
    shapes, rng = int(codes.max()) + 1, np.random.default_rng(0)
    sigma = (retest_ape_pct or 0.0) / 100 / RETEST_SIGMAS
    drawn = np.empty((RESAMPLES, len(names)))
    for of_resample in drawn:
        times_drawn = np.bincount(rng.integers(0, shapes, shapes), minlength=shapes)[codes]
        points = np.repeat(np.arange(len(codes)), times_drawn)
        resampled = errors[:, points] + rng.normal(0.0, sigma, len(points))
        of_resample[:] = np.median(ape_pct(resampled), axis=1)
    return Medians(
        pct=dict(zip(names, np.median(ape_pct(errors), axis=1).tolist(), strict=True)),
        drawn=pd.DataFrame(drawn, columns=names),
        shapes=shapes,
    )
