"""Errors of lookups and updates on shapes and index streams that training did not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.eval.recommenders.points import LOOKUPS
from itercast.eval.recommenders.sweep import twice_measured
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import reference_anchors
from itercast.learners.train import digest_of, errors, hardware_of, train_family, usable_rows
from itercast.microbench.ops import families
from itercast.microbench.ops.lookup.random_streams import stream_kind

UNIFORM = "uniform"
LEAST_ROWS = 40  # of uniform streams, to learn from them alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors in % over shapes that were measured twice.

    ``errors`` are those of forecasts, ``retest`` of the second measurement against the first.
    """

    name: str
    rows: int
    errors: dict[str, float]
    retest: dict[str, float]


def scores(root: Path, bundle: Bundle) -> Iterator[Score]:
    """Yields the errors of each family and of each of its ops."""
    for name in LOOKUPS:
        rows = twice_measured(root, bundle, name)
        if rows.empty:
            continue
        rows = rows.assign(forecast_us=bundle.price(name, rows)["predicted_us"].to_numpy())
        yield score(name, rows)
        for op, some in rows.groupby("op"):
            yield score(f"  {op}", some)


def score(name: str, rows: pd.DataFrame) -> Score:
    """Errors of rows: forecasts are compared with the geometric mean of both measurements."""
    first, second = (rows[c].to_numpy(dtype=float) for c in ("first_us", "second_us"))
    forecast = rows["forecast_us"].to_numpy(dtype=float)
    return Score(
        name=name,
        rows=len(rows),
        errors=errors(forecast, np.sqrt(first * second)),
        retest=errors(second, first),
    )


def from_uniform_streams(root: Path, bundle: Bundle, studies: Path) -> Iterator[Score]:
    """Yields errors on streams that are not uniform, by models trained on two subsets of the rows.

    One subset has uniform streams alone; the other as many rows, drawn from all streams.
    """
    for name in LOOKUPS:
        rows = usable_rows([root / "train"], [name])[name]
        kinds = np.array([stream_kind(p) for p in rows.itertuples()])
        test = twice_measured(root, bundle, name)
        if test.empty or np.sum(kinds == UNIFORM) < LEAST_ROWS:
            continue
        test = test[[stream_kind(p) != UNIFORM for p in test.itertuples()]]
        some = np.random.default_rng(0).permutation(len(rows))[: int(np.sum(kinds == UNIFORM))]
        subsets = {
            "uniform streams alone": rows[kinds == UNIFORM],
            "as many of all": rows.iloc[some],
        }
        for label, subset in subsets.items():
            forecast_us = _learned_us(name, subset.reset_index(drop=True), test, root, studies)
            yield score(f"{name}, from {label}", test.assign(forecast_us=forecast_us))


def _learned_us(
    name: str, rows: pd.DataFrame, test: pd.DataFrame, root: Path, studies: Path
) -> np.ndarray:
    """Forecast the rows of ``test`` in us by a model of ``rows``."""
    anchors, gpus = reference_anchors({name: rows}), hardware_of([root / "train"], rows)
    digest = digest_of(rows)
    model = train_family(rows, families()[name], gpus, anchors, 0, digest, studies)[1]
    only = Bundle(models={name: model}, gpus=gpus, anchors=anchors)
    return np.asarray(only.price(name, test)["predicted_us"])
