"""Scores the learners that the blend is compared with, and makes one of them price ops instead."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from itercast.learners.family_model import FamilyModel, Learned, Prepared
from itercast.learners.models import trees
from itercast.learners.models.compared import (
    BLEND,
    LEARNERS,
    NAMES,
    PHYSICS,
    Fitted,
    Inputs,
    tile_waves,
)
from itercast.learners.models.ensemble import QUICK_ROUNDS, Ensemble, folds_of
from itercast.learners.models.training_table import Array
from itercast.learners.models.trees import Options, Rounds, Trees


def inputs_of(prepared: Prepared) -> Inputs:
    """The training rows as the learners see them."""
    query, table = prepared.query, prepared.table
    waves = tile_waves(query.rows, prepared.features, query.gpus)
    return Inputs(x=table.x, roofline_us=table.roofline_us, waves=waves)


def held_out_us(
    learned: Learned, known: Array, held: Array, options: Options, seconds: dict[str, float]
) -> dict[str, Array]:
    """Forecasts in us of the rows ``held`` by each other learner, fitted to the rows ``known``.

    ``seconds`` gets how long each took; trees that are part of the blend count in its time.
    """
    prepared = learned.prepared
    rows, time_us = inputs_of(prepared), prepared.table.time_us
    train, asked = rows.take(known), rows.take(held)
    found = {}
    for name, fit in LEARNERS.items():
        begin = time.monotonic()
        found[name] = fit(train, time_us[known])(asked)
        seconds[name] = time.monotonic() - begin
    begin = time.monotonic()
    boosted = learned.ensemble.trees or _trees(prepared, known, learned.crossed.rounds, options)
    found[PHYSICS] = trees.predict_us(boosted, asked.x, asked.roofline_us)
    seconds[PHYSICS] = time.monotonic() - begin
    return found


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


def learner_model(model: FamilyModel, prepared: Prepared, name: str) -> FamilyModel:
    """The family's model with another learner, fitted to all rows, in the place of the blend."""
    model = replace(model, facts={**model.facts, "learner": name})
    table = prepared.table
    if name == PHYSICS:
        every, options = np.arange(len(table.time_us)), trees.default_options(table)
        alone = model.ensemble.trees or _trees(prepared, every, None, options)
        return replace(model, ensemble=Ensemble(trees=alone))
    return replace(model, learner=LEARNERS[name](inputs_of(prepared), table.time_us))


def learner_models(model: FamilyModel, prepared: Prepared) -> dict[str, FamilyModel]:
    """The family's model with every other learner in the place of the blend, by name."""
    return {name: learner_model(model, prepared, name) for name in NAMES if name != BLEND}
