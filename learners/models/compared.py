"""Other learners that the ensemble of a bundle is compared with, fitted to the same rows.

Each fit takes the training rows as ``Inputs`` with their times, and returns a function that
predicts times in us of other rows. ``LEARNERS`` names them, the simplest first; those that other
packages add come last. A bundle can hold those here, which return a ``Fitted``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from itercast.capture.base.extensions import with_added
from itercast.learners.features.table import Features, map_values
from itercast.learners.models.tile_network import fit_tiles, tiles_us
from itercast.learners.models.training_table import Array
from itercast.microbench.hardware.spec import Gpu

BLEND = "blend"  # the ensemble that a bundle holds, with its corrections near measured points
PHYSICS = "xgboost-physics"  # the ensemble's boosted trees alone
WAVES = ("log_waves", "log_waves_128x128")  # features of families that run as tiles
TILE_BYTES = 64 * 1024  # moved by one tile of a family whose features have no waves


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What learners know of rows; arrays whose first axis is the row.

    ``x``: the encoded features; ``roofline_us``; ``waves``: tiles of the output over those that run
    at once.
    """

    x: Array
    roofline_us: Array
    waves: Array

    def take(self, index: Array) -> Inputs:
        """The rows of these indices."""
        x, roofline_us, waves = (a[index] for a in (self.x, self.roofline_us, self.waves))
        return Inputs(x=x, roofline_us=roofline_us, waves=waves)


def tile_waves(rows: pd.DataFrame, features: Features, gpus: Mapping[str, Gpu]) -> Array:
    """How often the tiles of an op fill all cores: from the features, else from bytes moved."""
    for name in WAVES:
        if name in features:
            return np.asarray(2.0 ** features[name])
    cores = {name: float(gpu.sm_count) for name, gpu in gpus.items()}
    on = map_values(rows["gpu"].to_numpy(dtype=object), cores, 1.0, float)
    return np.ceil(2.0 ** features["log_bytes"] / TILE_BYTES / on)


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
        return OWN[self.name].times_us(self.arrays, asked)


@dataclass(frozen=True, slots=True)
class Learner:
    """How a learner of a bundle is fitted, to arrays, and forecasts times in us by them."""

    arrays: Callable[[Inputs, Array], Arrays]
    times_us: Callable[[Arrays, Inputs], Array]


def _fitted(name: str, rows: Inputs, time_us: Array) -> Fitted:
    return Fitted(name=name, arrays=OWN[name].arrays(rows, time_us))


def _median_ratio(rows: Inputs, time_us: Array) -> Arrays:
    return {"log_ratio": np.array(np.median(np.log(time_us / rows.roofline_us)))}


def _scaled_roofline_us(fitted: Arrays, asked: Inputs) -> Array:
    """The roofline times one factor, the median of measured time / roofline."""
    return asked.roofline_us * np.exp(fitted["log_ratio"])


def _weights(rows: Inputs, time_us: Array) -> Arrays:
    """Ridge regression of log time on the standardised features and the log roofline."""
    scaling = {"mean": rows.x.mean(0), "spread": rows.x.std(0) + 1e-6}
    a = _standardised(scaling, rows)
    weights = np.linalg.solve(a.T @ a + 1e-2 * np.eye(a.shape[1]), a.T @ np.log(time_us))
    return {**scaling, "weights": weights}


def _linear_us(fitted: Arrays, asked: Inputs) -> Array:
    return np.exp(np.clip(_standardised(fitted, asked) @ fitted["weights"], -5, 25))


def _standardised(scaling: Arrays, rows: Inputs) -> Array:
    scaled = (rows.x - scaling["mean"]) / scaling["spread"]
    return np.c_[scaled, np.log(rows.roofline_us), np.ones(len(scaled))]


def _points(rows: Inputs, time_us: Array) -> Arrays:
    return {"x": rows.x, "log_ratio": np.log(time_us / rows.roofline_us)}


def _nearest_us(fitted: Arrays, asked: Inputs) -> Array:
    """The roofline times the mean ratio of the three nearest rows in standardised features."""
    from scipy.spatial import cKDTree  # lazy: pricing does without

    rows, ratio = fitted["x"], fitted["log_ratio"]
    mean, spread = rows.mean(0), rows.std(0) + 1e-6
    known, queried = (rows - mean) / spread, (asked.x - mean) / spread
    near = cKDTree(known).query(queried, k=min(3, len(known)))[1].reshape(len(queried), -1)
    return asked.roofline_us * np.exp(ratio[near].mean(1))


OWN: Mapping[str, Learner] = {
    "roofline": Learner(_median_ratio, _scaled_roofline_us),
    "linear": Learner(_weights, _linear_us),
    "nearest": Learner(_points, _nearest_us),
    "tile-mlp": Learner(
        lambda rows, time_us: fit_tiles(rows.x, rows.roofline_us, rows.waves, time_us),
        lambda fitted, asked: tiles_us(fitted, asked.x, asked.roofline_us, asked.waves),
    ),
}
FITS: Mapping[str, Fit] = {name: partial(_fitted, name) for name in OWN}
LEARNERS = with_added("learners", FITS, Callable)
NAMES = (*LEARNERS, PHYSICS, BLEND)
