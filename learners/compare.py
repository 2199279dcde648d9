"""Scores the learners that the blend is compared with, and makes one of them price ops instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd

from itercast.learners.family_model import FamilyModel, Forecasts, Learned, Prepared
from itercast.learners.features.table import Features, map_values
from itercast.learners.models import trees
from itercast.learners.models.compared import (
    BLEND,
    LEARNERS,
    NAMES,
    PHYSICS,
    Fitted,
    Inputs,
    Predict,
)
from itercast.learners.models.ensemble import QUICK_ROUNDS, Ensemble, folds_of
from itercast.learners.models.training_table import Array
from itercast.learners.models.trees import Options, Rounds, Trees
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family

WAVES = ("log_waves", "log_waves_128x128")  # features of families that run as tiles
TILE_BYTES = 64 * 1024  # moved by one tile of a family whose features have no waves


def tile_waves(rows: pd.DataFrame, features: Features, gpus: Mapping[str, Gpu]) -> Array:
    """How often the tiles of an op fill all cores: from the features, else from bytes moved."""
    for name in WAVES:
        if name in features:
            return np.asarray(2.0 ** features[name])
    cores = {name: float(gpu.sm_count) for name, gpu in gpus.items()}
    on = map_values(rows["gpu"].to_numpy(dtype=object), cores, 1.0, float)
    return np.ceil(2.0 ** features["log_bytes"] / TILE_BYTES / on)


def inputs_of(prepared: Prepared) -> Inputs:
    """The training rows as the learners see them."""
    query, table = prepared.query, prepared.table
    return Inputs(
        x=table.x,
        roofline_us=table.roofline_us,
        waves=tile_waves(query.rows, prepared.features, query.gpus),
    )


def held_out_us(learned: Learned, known: Array, held: Array, options: Options) -> dict[str, Array]:
    """Forecasts in us of the rows ``held`` by each other learner, fitted to the rows ``known``."""
    prepared = learned.prepared
    rows, time_us = inputs_of(prepared), prepared.table.time_us
    train, asked = rows.take(known), rows.take(held)
    found = {name: fit(train, time_us[known])(asked) for name, fit in LEARNERS.items()}
    boosted = learned.ensemble.trees or _trees(prepared, known, learned.crossed.rounds, options)
    return {**found, PHYSICS: trees.predict_us(boosted, asked.x, asked.roofline_us)}


def _trees(prepared: Prepared, known: Array, rounds: Rounds | None, options: Options) -> Trees:
    """The boosted trees of a family whose ensemble has none."""
    table = prepared.table.take(known)
    usual = Rounds(common=trees.SHARED_ROUNDS + QUICK_ROUNDS)
    return trees.refit(table, options, rounds or usual)


def out_of_fold_log_errors(learned: Learned, known: Array) -> dict[str, Array]:
    """log(measured / forecast) of the rows ``known`` by each learner without their fold of shapes.

    Of learners that a bundle can hold.
    """
    prepared, crossed = learned.prepared, learned.crossed
    train = prepared.table.take(known)
    rows = inputs_of(prepared).take(known)
    found = {BLEND: crossed.residual}
    if crossed.trees_residual is not None:
        found[PHYSICS] = crossed.trees_residual
    for name, fit in LEARNERS.items():
        guess = np.ones(len(known))
        for held in folds_of(train):
            rest = ~held if not held.all() else held
            learner = fit(rows.take(rest), train.time_us[rest])
            if not isinstance(learner, Fitted):
                break
            guess[held] = learner(rows.take(held))
        else:
            found[name] = np.log(train.time_us / guess)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel(FamilyModel):
    """A family's model that prices by another learner where the GPU and the op were measured.

    The blend prices other rows, and those of calibrated GPUs.
    """

    learner: Predict

    def predict(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> Forecasts:
        """Forecast rows in dataset form, in their order."""
        blend = super(LearnerModel, self).predict(rows, family, gpus)
        query, table, roofline = self._query(rows, family, gpus)
        guess = self.learner(
            Inputs(
                x=self.encoder.encode(table),
                roofline_us=roofline,
                waves=tile_waves(query.rows, table, gpus),
            )
        )
        others = self.source_gpus.unseen(query) | query.lent
        others = others | np.isin(query.rows["gpu"].to_numpy(dtype=str), list(self.calibrations))
        factor = np.where(others, 1.0, guess / blend.time_us)
        return replace(
            blend,
            time_us=blend.time_us * factor,
            p10_us=blend.p10_us * factor,
            p90_us=blend.p90_us * factor,
        )


def learner_model(model: FamilyModel, prepared: Prepared, name: str) -> FamilyModel:
    """The family's model with another learner, fitted to all rows, in the place of the blend."""
    model = replace(model, facts={**model.facts, "learner": name})
    table = prepared.table
    if name == PHYSICS:
        every, options = np.arange(len(table.time_us)), trees.default_options(table)
        alone = model.ensemble.trees or _trees(prepared, every, None, options)
        return replace(model, ensemble=Ensemble(trees=alone))
    return as_learner(model, LEARNERS[name](inputs_of(prepared), table.time_us))


def as_learner(model: FamilyModel, learner: Predict) -> LearnerModel:
    """The family's model with a fitted learner in the place of the blend."""
    facts = {f.name: getattr(model, f.name) for f in fields(FamilyModel)}
    return LearnerModel(**facts, learner=learner)


def learner_models(model: FamilyModel, prepared: Prepared) -> dict[str, FamilyModel]:
    """The family's model with every other learner in the place of the blend, by name."""
    return {name: learner_model(model, prepared, name) for name in NAMES if name != BLEND}
