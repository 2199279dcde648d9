"""Other learners that the ensemble of a bundle is compared with, fitted to the same rows.

Each fit takes the training rows as ``Inputs`` with their times, and returns a function that
predicts times in us of other rows. ``LEARNERS`` names them, the simplest first; those that other
packages add come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost as xgb

from itercast.learners.models import baselines, trees
from itercast.learners.models.tile_network import fit_tiles
from itercast.learners.models.training_table import Array, Table
from itercast.microbench.extensions import with_added

BLEND = "blend"  # the ensemble that a bundle holds, with its corrections near measured points
PHYSICS = "xgboost-physics"  # the ensemble's boosted trees alone
FOREST_TREES = 60
PLAIN_ROUNDS = 300
PLAIN: dict[str, Any] = {**trees.DEFAULTS, "objective": "reg:squarederror", "nthread": 1, "seed": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What learners know of rows; arrays whose first axis is the row.

    ``raw``: the op's parameters, strings one-hot; ``x``: the encoded features; ``roofline_us``;
    ``waves``: tiles of the output over those that run at once.
    """

    raw: Array
    x: Array
    roofline_us: Array
    waves: Array

    def take(self, index: Array) -> Inputs:
        """The rows of these indices."""
        return Inputs(
            raw=self.raw[index],
            x=self.x[index],
            roofline_us=self.roofline_us[index],
            waves=self.waves[index],
        )


Predict = Callable[[Inputs], Array]
Fit = Callable[[Inputs, Array], Predict]


def _table(rows: Inputs, time_us: Array) -> Table:
    group = np.arange(len(time_us))
    return Table(x=rows.x, roofline_us=rows.roofline_us, time_us=time_us, group=group)


def fit_roofline(rows: Inputs, time_us: Array) -> Predict:
    """The roofline times one factor, the median of measured time / roofline."""
    table = _table(rows, time_us)
    return lambda asked: baselines.predict_roofline(table, asked.x, asked.roofline_us)


def fit_linear(rows: Inputs, time_us: Array) -> Predict:
    """Ridge regression of log time on the features and the log roofline."""
    table = _table(rows, time_us)
    return lambda asked: baselines.predict_linear(table, asked.x, asked.roofline_us)


def fit_nearest(rows: Inputs, time_us: Array) -> Predict:
    """The roofline times the mean of time / roofline of the k rows with the nearest features."""
    table = _table(rows, time_us)
    return lambda asked: baselines.predict_nearest(table, asked.x, asked.roofline_us)


def fit_forest(rows: Inputs, time_us: Array) -> Predict:
    """A random forest of log time on the raw parameters."""
    from sklearn.ensemble import RandomForestRegressor  # lazy: forecasts do without

    forest = RandomForestRegressor(FOREST_TREES, random_state=0, n_jobs=1)
    forest.fit(rows.raw, np.log(time_us))
    return lambda asked: np.exp(forest.predict(asked.raw))


def fit_tile_network(rows: Inputs, time_us: Array) -> Predict:
    """A network of tile utilisation (``itercast.learners.models.tile_network``)."""
    predict = fit_tiles(rows.x, rows.roofline_us, rows.waves, time_us)
    return lambda asked: predict(asked.x, asked.roofline_us, asked.waves)


def fit_plain_trees(rows: Inputs, time_us: Array) -> Predict:
    """Boosted trees of log time on the raw parameters, without rooflines or features."""
    data = xgb.DMatrix(rows.raw, label=np.log(time_us))
    booster = xgb.train(PLAIN, data, PLAIN_ROUNDS)
    return lambda asked: np.exp(booster.inplace_predict(asked.raw))


OWN: Mapping[str, Fit] = {
    "roofline": fit_roofline,
    "linear": fit_linear,
    "nearest": fit_nearest,
    "forest": fit_forest,
    "tile-mlp": fit_tile_network,
    "xgboost-plain": fit_plain_trees,
}
LEARNERS = with_added("learners", OWN, Callable)
NAMES = (*LEARNERS, PHYSICS, BLEND)
