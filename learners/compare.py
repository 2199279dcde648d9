"""Scores the other learners of ``itercast.learners.models.compared`` and makes them price ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from itercast.learners.family_model import FamilyModel, Forecasts, Learned, Prepared
from itercast.learners.features.table import Encoder, Features, broadcast, columns, map_values
from itercast.learners.models import trees
from itercast.learners.models.compared import LEARNERS, PHYSICS, Inputs, Predict
from itercast.learners.models.ensemble import QUICK_ROUNDS
from itercast.learners.models.training_table import Array
from itercast.learners.models.trees import Rounds, Trees
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family

WAVES = ("log_waves", "log_waves_128x128")  # features of families that run as tiles
TILE_BYTES = 64 * 1024  # moved by one tile of a family whose features have no waves


def raw_features(rows: pd.DataFrame, features: Features, family: Family) -> Features:
    """A family's parameters as they are, the GPU, the threads and whether caches were cold."""
    raw = {name: broadcast(value, len(rows)) for name, value in vars(columns(rows, family)).items()}
    place = {"gpu": rows["gpu"].to_numpy(dtype=object)}
    return {**raw, **place, "threads": features["threads"], "cold": features["cold"]}


def tile_waves(rows: pd.DataFrame, features: Features, gpus: Mapping[str, Gpu]) -> Array:
    """How often the tiles of an op fill all cores: from the features, else from bytes moved."""
    for name in WAVES:
        if name in features:
            return np.asarray(2.0 ** features[name])
    cores = {name: float(gpu.sm_count) for name, gpu in gpus.items()}
    on = map_values(rows["gpu"].to_numpy(dtype=object), cores, 1.0, float)
    return np.ceil(2.0 ** features["log_bytes"] / TILE_BYTES / on)


def inputs_of(prepared: Prepared, raw: Encoder) -> Inputs:
    """The training rows as the learners see them."""
    query, table = prepared.query, prepared.table
    return Inputs(
        raw=raw.encode(raw_features(query.rows, prepared.features, query.family)),
        x=table.x,
        roofline_us=table.roofline_us,
        waves=tile_waves(query.rows, prepared.features, query.gpus),
    )


def raw_encoder(prepared: Prepared) -> Encoder:
    """One column per number of the raw parameters and per value of their strings."""
    query = prepared.query
    return Encoder.fit(raw_features(query.rows, prepared.features, query.family))


def held_out_us(
    learned: Learned, known: Array, held: Array, options: dict[str, Any]
) -> dict[str, Array]:
    """Forecasts in us of the rows ``held`` by each other learner, fitted to the rows ``known``."""
    prepared = learned.prepared
    rows, time_us = inputs_of(prepared, raw_encoder(prepared)), prepared.table.time_us
    train, asked = rows.take(known), rows.take(held)
    found = {name: fit(train, time_us[known])(asked) for name, fit in LEARNERS.items()}
    boosted = learned.ensemble.trees or _trees(prepared, known, learned.crossed.rounds, options)
    return {**found, PHYSICS: trees.predict_us(boosted, asked.x, asked.roofline_us)}


def _trees(
    prepared: Prepared, known: Array, rounds: Rounds | None, options: dict[str, Any]
) -> Trees:
    """The boosted trees of a family whose ensemble has none."""
    table = prepared.table.take(known)
    usual = Rounds(common=trees.SHARED_ROUNDS + QUICK_ROUNDS)
    return trees.refit(table, options, rounds or usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel(FamilyModel):
    """A family's model that prices by another learner; intervals are those of the blend."""

    learner: Predict
    raw: Encoder

    def predict(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> Forecasts:
        """Forecast rows in dataset form, in their order."""
        query, table, roofline = self._query(rows, family, gpus)
        guess = self.learner(
            Inputs(
                raw=self.raw.encode(raw_features(query.rows, table, family)),
                x=self.encoder.encode(table),
                roofline_us=roofline,
                waves=tile_waves(query.rows, table, gpus),
            )
        )
        low, high = self.offsets
        return Forecasts(
            time_us=guess,
            p10_us=guess * np.exp(low),
            p90_us=guess * np.exp(high),
            inside=self._inside(query, table),
            roofline_us=roofline,
        )


def learner_models(model: FamilyModel, prepared: Prepared) -> dict[str, FamilyModel]:
    """The family's model with every other learner in the place of the blend, by name."""
    raw = raw_encoder(prepared)
    rows, time_us = inputs_of(prepared, raw), prepared.table.time_us
    fitted = {name: fit(rows, time_us) for name, fit in LEARNERS.items()}
    options = trees.default_options(prepared.table)
    boosted = model.ensemble.trees or _trees(prepared, np.arange(len(time_us)), None, options)
    fitted[PHYSICS] = lambda asked: trees.predict_us(boosted, asked.x, asked.roofline_us)
    facts = {f.name: getattr(model, f.name) for f in fields(FamilyModel)}
    return {name: LearnerModel(**facts, learner=one, raw=raw) for name, one in fitted.items()}
