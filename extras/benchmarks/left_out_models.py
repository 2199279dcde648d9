"""Errors of op models on the shapes of models of which they have learned no row.

What users bring is a model that nobody measured. Models take turns in being left out: a fold's
models teach nothing by any of their shapes, and those shapes that no other model has judge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.table import Table

from itercast.eval.results import COLUMNS, RETEST
from itercast.eval.tables import headed, one_decimal
from itercast.extras.campaign.drawn_from import ShapesByModel, shape_texts
from itercast.learners.compare import held_out_us
from itercast.learners.family_model import learn, prepare
from itercast.learners.models.compared import BLEND
from itercast.learners.models.trees import default_options
from itercast.learners.train import errors
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family
from itercast.microbench.store import Facts

FOLDS = 5
BASELINES = ("roofline", "nearest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Rows to learn from and rows that judge, as indices; the others are used for neither."""

    known: np.ndarray
    judged: np.ndarray


def folds(shapes: np.ndarray, shapes_by_model: ShapesByModel) -> list[Fold]:
    """Leave a fifth of the models out in turn, of rows of these ``shapes``.

    A shape that also another model has neither teaches nor judges while one of its models is out.
    """
    names = np.random.default_rng(0).permutation(sorted(shapes_by_model))
    turns = []
    for out in (set(names[n::FOLDS].tolist()) for n in range(FOLDS)):
        is_left_out = _of_models(shapes, shapes_by_model, out)
        is_shared = _of_models(shapes, shapes_by_model, set(names.tolist()) - out)
        judged = np.flatnonzero(is_left_out & ~is_shared)
        if len(judged):
            turns.append(Fold(known=np.flatnonzero(~is_left_out), judged=judged))
    return turns


def _of_models(
    shapes: np.ndarray, shapes_by_model: ShapesByModel, models: Collection[str]
) -> np.ndarray:
    """Mask of the shapes that one of these models has."""
    return np.isin(shapes, [shape for name in models for shape in shapes_by_model[name]])


def model_errors(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu], shapes_by_model: ShapesByModel
) -> dict[str, dict[str, float]]:
    """Errors in % by learner on all rows that judge, and how many ``rows`` these are.

    Empty where no row is of a model.
    """
    turns = folds(shape_texts(rows, family), shapes_by_model)
    if not turns:
        return {}
    prepared = prepare(rows, family, gpus)
    forecasts_us: dict[str, list[np.ndarray]] = {name: [] for name in (BLEND, *BASELINES)}
    for turn in turns:
        options = default_options(prepared.table.take(turn.known))
        learned = learn(prepared, turn.known, options)
        found = held_out_us(learned, turn.known, turn.judged, options, {})
        found[BLEND] = learned.predict_us(turn.judged)
        for name, forecasts in forecasts_us.items():
            forecasts.append(found[name])
    measured_us = prepared.table.time_us[np.concatenate([turn.judged for turn in turns])]
    return {
        name: {**errors(np.concatenate(forecasts), measured_us), "rows": len(measured_us)}
        for name, forecasts in forecasts_us.items()
    }


def model_table(
    title: str, scored: Mapping[str, Mapping[str, Mapping[str, float]]], report: Facts
) -> Table:
    """A line per family: errors of ``model_errors``, the retest error, medians of baselines.

    ``report``: of a training of the same rows; its median error on shapes left out is the last
    column. Families without rows of models have only these.
    """
    medians = [f"{name} median" for name in (*BASELINES, "shapes")]
    table = headed(f"{title}, errors in %", "", "rows", *COLUMNS, *medians, texts=("",))
    for family, entry in report.items():
        by_learner, shapes = scored.get(family, {}), entry["learners"][BLEND]
        blend = {**by_learner.get(BLEND, {}), RETEST: entry["retest_ape_pct"]}
        cells: Sequence[float | None] = [
            *(blend.get(key) for key in COLUMNS.values()),
            *(by_learner.get(name, {}).get("median_ape_pct") for name in BASELINES),
            shapes["median_ape_pct"],
        ]
        table.add_row(family, f"{blend.get('rows', 0):.0f}", *map(one_decimal, cells))
    return table
