"""Forecasts of held-out rows by the learners that the blend is compared with."""

from __future__ import annotations

import time

from itercast.learners.family_model import Learned, Prepared
from itercast.learners.models import trees
from itercast.learners.models.compared import LEARNERS, PHYSICS, Inputs
from itercast.learners.models.ensemble import QUICK_ROUNDS
from itercast.learners.models.training_table import Array
from itercast.learners.models.trees import Options, Rounds, Trees


def inputs_of(prepared: Prepared) -> Inputs:
    """The training rows as the learners see them."""
    return Inputs(x=prepared.table.x, roofline_us=prepared.table.roofline_us)


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
    usual = Rounds(common=trees.SHARED_ROUNDS + QUICK_ROUNDS)
    return trees.refit(prepared.table.take(known), options, rounds or usual)
