"""Forecasts of held-out rows by the learners that the blend is compared with."""

from __future__ import annotations

import time

from itercast.learners.family_model import Learned, Prepared
from itercast.learners.models import trees
from itercast.learners.models.compared import LEARNERS, PHYSICS, Inputs
from itercast.learners.models.ensemble import QUICK_ROUNDS
from itercast.learners.models.training_table import Array
from itercast.learners.models.trees import Options, Rounds


def inputs_of(prepared: Prepared) -> Inputs:
    """The training rows as the learners see them."""
    return Inputs(x=prepared.table.x, roofline_us=prepared.table.roofline_us)


def held_out_us(
    learned: Learned,
    train_rows: Array,
    test_rows: Array,
    options: Options,
    seconds: dict[str, float],
) -> dict[str, Array]:
    """Forecasts in us of rows ``test_rows`` by each other learner, fitted to ``train_rows``.

    ``seconds`` gets how long each took; trees that are part of the blend count in its time.
    """
    prepared = learned.prepared
    rows, time_us = inputs_of(prepared), prepared.table.time_us
    train, test = rows.take(train_rows), rows.take(test_rows)
    forecasts_us = {}
    for name, fit in LEARNERS.items():
        begin = time.monotonic()
        forecasts_us[name] = fit(train, time_us[train_rows])(test)
        seconds[name] = time.monotonic() - begin
    begin = time.monotonic()
    rounds = learned.crossed.rounds or Rounds(common=trees.SHARED_ROUNDS + QUICK_ROUNDS)
    known = prepared.table.take(train_rows)
    boosted = learned.ensemble.trees or trees.refit(known, options, rounds)
    forecasts_us[PHYSICS] = trees.predict_us(boosted, test.x, test.roofline_us)
    seconds[PHYSICS] = time.monotonic() - begin
    return forecasts_us
