"""Simple regressors that the trees are compared with: scaled roofline, linear, k-nearest.

Each takes the training table, and the features and rooflines (us) of the rows to predict; each
returns times in us.
"""

from __future__ import annotations

import numpy as np

from itercast.learners.models.training_table import Array, Table


def predict_roofline(train: Table, x: Array, roofline_us: Array) -> Array:
    """Predict the roofline times the median of measured time / roofline."""
    return roofline_us * np.exp(np.median(train.log_ratio))


def predict_linear(train: Table, x: Array, roofline_us: Array) -> Array:
    """Predict by ridge regression of log time on the standardised features and log roofline."""
    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    a = np.c_[(train.x - mean) / spread, np.log(train.roofline_us), np.ones(len(train.x))]
    w = np.linalg.solve(a.T @ a + 1e-2 * np.eye(a.shape[1]), a.T @ np.log(train.time_us))
    b = np.c_[(x - mean) / spread, np.log(roofline_us), np.ones(len(x))]
    return np.exp(np.clip(b @ w, -5, 25))


def predict_nearest(train: Table, x: Array, roofline_us: Array, k: int = 3) -> Array:
    """Predict the mean log ratio of the k nearest training rows in standardised features."""
    from scipy.spatial import cKDTree  # lazy: pricing does without

    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    known, queried = (train.x - mean) / spread, (x - mean) / spread
    ratio = train.log_ratio
    near = cKDTree(known).query(queried, k=min(k, len(known)))[1].reshape(len(queried), -1)
    return roofline_us * np.exp(ratio[near].mean(1))
