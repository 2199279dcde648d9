"""Simple learners that the ensemble of a bundle is compared with, fitted to the same rows.

Each fit takes the training rows as ``Inputs`` with their times, and returns a function that
predicts times in us of other rows. ``LEARNERS`` names them, the simplest first; those that other
packages add come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.extensions import with_added
from itercast.learners.models.training_table import Array

BLEND = "blend"  # the ensemble that a bundle holds, with its corrections near measured points
PHYSICS = "xgboost-physics"  # the ensemble's boosted trees alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What learners know of rows: ``x``, their encoded features, and ``roofline_us``.

    The first axis of both is the row.
    """

    x: Array
    roofline_us: Array

    def take(self, index: Array) -> Inputs:
        """The rows of these indices."""
        return Inputs(x=self.x[index], roofline_us=self.roofline_us[index])


Predict = Callable[[Inputs], Array]
Fit = Callable[[Inputs, Array], Predict]


def scaled_roofline(rows: Inputs, time_us: Array) -> Predict:
    """The roofline times one factor, the median of measured time / roofline."""
    factor = np.exp(np.median(np.log(time_us / rows.roofline_us)))
    return lambda others: others.roofline_us * factor


def linear(rows: Inputs, time_us: Array) -> Predict:
    """Ridge regression of log time on the standardised features and the log roofline."""
    mean, spread = rows.x.mean(0), rows.x.std(0) + 1e-6

    def standardised(inputs: Inputs) -> Array:
        return np.c_[(inputs.x - mean) / spread, np.log(inputs.roofline_us), np.ones(len(inputs.x))]

    design = standardised(rows)
    weights = np.linalg.solve(
        design.T @ design + 1e-2 * np.eye(design.shape[1]), design.T @ np.log(time_us)
    )
    return lambda others: np.exp(np.clip(standardised(others) @ weights, -5, 25))


def nearest(rows: Inputs, time_us: Array) -> Predict:
    """The roofline times the mean ratio of the three nearest rows in standardised features."""
    from scipy.spatial import cKDTree  # lazy: pricing does without

    mean, spread = rows.x.mean(0), rows.x.std(0) + 1e-6
    tree, ratio = cKDTree((rows.x - mean) / spread), np.log(time_us / rows.roofline_us)

    def predict(others: Inputs) -> Array:
        nearest_rows = tree.query((others.x - mean) / spread, k=min(3, len(ratio)))[1]
        log_ratio = ratio[nearest_rows.reshape(len(others.x), -1)].mean(1)
        return np.asarray(others.roofline_us * np.exp(log_ratio))

    return predict


FITS: Mapping[str, Fit] = {"roofline": scaled_roofline, "linear": linear, "nearest": nearest}
LEARNERS = with_added("learners", FITS, Callable)
NAMES = (*LEARNERS, PHYSICS, BLEND)
