"""Simple regressors that the trees are compared with: scaled roofline, linear, k-nearest.

``*_arrays`` fits one to training rows; ``*_us`` predicts times in us from these arrays, and from
the features and rooflines (us) of the rows to predict.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from itercast.learners.models.training_table import Array

Arrays = Mapping[str, Array]


def roofline_arrays(log_ratio: Array) -> Arrays:
    """The median of log(measured time / roofline)."""
    return {"log_ratio": np.array(np.median(log_ratio))}


def roofline_us(fitted: Arrays, x: Array, roofline_us: Array) -> Array:
    """Predict the roofline times the median of measured time / roofline."""
    return roofline_us * np.exp(fitted["log_ratio"])


def linear_arrays(x: Array, roofline_us: Array, time_us: Array) -> Arrays:
    """Ridge regression of log time on the standardised features and log roofline."""
    scaling = {"mean": x.mean(0), "spread": x.std(0) + 1e-6}
    a = _standardised(scaling, x, roofline_us)
    weights = np.linalg.solve(a.T @ a + 1e-2 * np.eye(a.shape[1]), a.T @ np.log(time_us))
    return {**scaling, "weights": weights}


def linear_us(fitted: Arrays, x: Array, roofline_us: Array) -> Array:
    """Predict by the linear function of features and log roofline."""
    log_time = _standardised(fitted, x, roofline_us) @ fitted["weights"]
    return np.exp(np.clip(log_time, -5, 25))


def _standardised(scaling: Arrays, x: Array, roofline_us: Array) -> Array:
    scaled = (x - scaling["mean"]) / scaling["spread"]
    return np.c_[scaled, np.log(roofline_us), np.ones(len(x))]


def nearest_arrays(x: Array, log_ratio: Array) -> Arrays:
    """The training rows' features, and log(measured time / roofline)."""
    return {"x": x, "log_ratio": log_ratio}


def nearest_us(fitted: Arrays, x: Array, roofline_us: Array) -> Array:
    """Predict the mean log ratio of the three nearest training rows in standardised features."""
    from scipy.spatial import cKDTree  # lazy: pricing does without

    rows, ratio = fitted["x"], fitted["log_ratio"]
    mean, spread = rows.mean(0), rows.std(0) + 1e-6
    known, queried = (rows - mean) / spread, (x - mean) / spread
    near = cKDTree(known).query(queried, k=min(3, len(known)))[1].reshape(len(queried), -1)
    return roofline_us * np.exp(ratio[near].mean(1))
