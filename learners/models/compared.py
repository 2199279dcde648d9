"""Other learners that the ensemble of a bundle is compared with, fitted to the same rows.

Each fit takes the training rows as ``Inputs`` with their times, and returns a function that
predicts times in us of other rows. ``LEARNERS`` names them, the simplest first; those that other
packages add come last. A bundle can hold those here, which return a ``Fitted``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import xgboost as xgb

from itercast.learners.models import baselines, trees
from itercast.learners.models.tile_network import fit_tiles, tiles_us
from itercast.learners.models.training_table import Array
from itercast.microbench.extensions import with_added

BLEND = "blend"  # the ensemble that a bundle holds, with its corrections near measured points
PHYSICS = "xgboost-physics"  # the ensemble's boosted trees alone
FOREST: trees.Options = {  # one round of many deep trees
    "num_parallel_tree": 60,
    "eta": 1.0,
    "subsample": 0.63,
    "colsample_bynode": 0.8,
    "max_depth": 0,
    "lambda": 0.0,
    "nthread": 1,
    "seed": 0,
}
PLAIN_ROUNDS = 300
PLAIN: trees.Options = {**trees.DEFAULTS, "objective": "reg:squarederror", "nthread": 1, "seed": 0}


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
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A fitted learner: its name and all that its forecasts need, as arrays."""

    name: str
    arrays: Arrays

    def __call__(self, asked: Inputs) -> Array:
        """Predict times in us."""
        return PREDICTORS[self.name](self.arrays, asked)


def fit_roofline(rows: Inputs, time_us: Array) -> Fitted:
    """The roofline times one factor, the median of measured time / roofline."""
    return Fitted(
        name="roofline", arrays=baselines.roofline_arrays(np.log(time_us / rows.roofline_us))
    )


def fit_linear(rows: Inputs, time_us: Array) -> Fitted:
    """Ridge regression of log time on the features and the log roofline."""
    arrays = baselines.linear_arrays(rows.x, rows.roofline_us, time_us)
    return Fitted(name="linear", arrays=arrays)


def fit_nearest(rows: Inputs, time_us: Array) -> Fitted:
    """The roofline times the mean of time / roofline of the k rows with the nearest features."""
    arrays = baselines.nearest_arrays(rows.x, np.log(time_us / rows.roofline_us))
    return Fitted(name="nearest", arrays=arrays)


def fit_forest(rows: Inputs, time_us: Array) -> Fitted:
    """A random forest of log time on the raw parameters."""
    return Fitted(name="forest", arrays=_boosted(rows, time_us, FOREST, 1))


def fit_tile_network(rows: Inputs, time_us: Array) -> Fitted:
    """A network of tile utilisation (``itercast.learners.models.tile_network``)."""
    arrays = fit_tiles(rows.x, rows.roofline_us, rows.waves, time_us)
    return Fitted(name="tile-mlp", arrays=arrays)


def fit_plain_trees(rows: Inputs, time_us: Array) -> Fitted:
    """Boosted trees of log time on the raw parameters, without rooflines or features."""
    return Fitted(name="xgboost-plain", arrays=_boosted(rows, time_us, PLAIN, PLAIN_ROUNDS))


def _boosted(rows: Inputs, time_us: Array, options: trees.Options, rounds: int) -> Arrays:
    """Trees of log time on the raw parameters, as the bytes of XGBoost's file."""
    booster = xgb.train(options, xgb.DMatrix(rows.raw, label=np.log(time_us)), rounds)
    return {"trees": np.frombuffer(bytes(booster.save_raw("ubj")), dtype=np.uint8)}


def _trees_us(arrays: Arrays, asked: Inputs) -> Array:
    booster = xgb.Booster({"nthread": 1})
    booster.load_model(bytearray(arrays["trees"].tobytes()))
    return np.exp(booster.inplace_predict(asked.raw))


PREDICTORS: Mapping[str, Callable[[Arrays, Inputs], Array]] = {
    "roofline": lambda a, asked: baselines.roofline_us(a, asked.x, asked.roofline_us),
    "linear": lambda a, asked: baselines.linear_us(a, asked.x, asked.roofline_us),
    "nearest": lambda a, asked: baselines.nearest_us(a, asked.x, asked.roofline_us),
    "forest": _trees_us,
    "tile-mlp": lambda a, asked: tiles_us(a, asked.x, asked.roofline_us, asked.waves),
    "xgboost-plain": _trees_us,
}
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
