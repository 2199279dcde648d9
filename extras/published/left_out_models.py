"""Errors on each source's published iterations, by forecasts that use nothing of that source."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from itercast.capture.base.assumptions import leaving_out
from itercast.extras.imports.base import positive
from itercast.extras.processes import processes
from itercast.extras.published.fits.shipped import MAX_ROWS, OWN, SOURCES
from itercast.extras.published.left_out import assumptions, compared, fitted_sources
from itercast.extras.published.left_out_ops import KNOWN_ROWS, PUBLISHER, read_ops, source_in
from itercast.extras.published.lines import LineResult, ModelLine, Rows
from itercast.extras.published.models import (
    ASSUMED,
    INTERVAL,
    MEASURED,
    Answer,
    ForecastLine,
    add_forecasts,
    coverage,
    judged,
    with_fitted_hosts,
)
from itercast.extras.published.readers import gpus_of
from itercast.learners.bundle import Bundle
from itercast.learners.family_model import FamilyModel, Prepared, learn_quickly, prepare
from itercast.learners.intervals import log_error, unseen_offsets
from itercast.learners.models.training_table import group_split
from itercast.learners.models.trees import Options, default_options
from itercast.learners.train import widen_unseen_offsets
from itercast.learners.training_rows import subsample_evenly
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families

HELD_SHARE = 0.2  # of the shapes; to learn errors on measured GPUs
TRAINED_ON = {source_in(folder) for folder in SOURCES} | {OWN}  # sources of the shipped bundle
TEACHERS = {  # of these, those whose rows of a family it was trained on
    family: {OWN, *(source_in(f) for f, x in SOURCES.items() if family in (x.families or MAX_ROWS))}
    for family in MAX_ROWS
}
ROWS = 96  # of a line and source that are forecast anew, at most
ROW = "row"  # number of a row among those of its line and source


def run_models_left_out(
    public: Path, lines: Sequence[ForecastLine], bundle: Path
) -> Iterator[LineResult]:
    """Errors of each line on each of its sources' rows, without the source and with it.

    At most ROWS rows of a line and source are judged, drawn at random. If nothing was fitted on a
    source both errors are the same. If the shipped bundle holds rows of it, forecasts without it
    are by a bundle that is trained quickly on at most KNOWN_ROWS rows of a family, of other
    sources. A line that calibrates its forecasts on some models does so only in forecasts with the
    source.
    """
    fitted = fitted_sources(assumptions()) | TRAINED_ON
    for source in sorted({str(s) for x in lines for s in x.rows["source"].unique()}):
        mine = [(x.line, _rows_of(x, source)) for x in lines]
        mine = [(line, rows) for line, rows in mine if len(rows)]
        start = time.monotonic()
        again = [(line, sampled(line, rows)) for line, rows in mine]
        if source.casefold() in fitted:
            again = forecasts_without(source, again, public, bundle)
        seconds = (time.monotonic() - start) / max(len(mine), 1)
        for (line, rows), (_, without) in zip(mine, again, strict=True):
            with_it = judged(line, rows)
            without = without.set_index(ROW)
            with_it = with_it[with_it[ROW].isin(without.index)]
            if len(with_it):
                measured = with_it[MEASURED[line.part]].to_numpy(dtype=float)
                without = without.loc[with_it[ROW]].assign(**{MEASURED[line.part]: measured})
                one, other = without[line.part].to_numpy(), with_it[line.part].to_numpy()
                covered = (coverage(line, without), coverage(line, with_it))
                yield compared(_name(line), source, measured, one, other, seconds, covered)


def _name(line: ModelLine) -> str:
    return line.name if line.part == "step" else f"{line.name}, {line.part}"


def _rows_of(found: ForecastLine, source: str) -> Rows:
    """Rows of a line that a source measured, with new numbers."""
    good = (found.rows["source"] == source) & (positive(found.rows[MEASURED[found.line.part]]) > 0)
    rows: Rows = found.rows[good].reset_index(drop=True)
    return rows.assign(**{ROW: np.arange(len(rows))})


def sampled(line: ModelLine, rows: Rows, most: int = ROWS) -> Rows:
    """At most ``most`` of the rows, drawn at random, and all that fit hosts, in their order."""
    fits = line.fits(rows)
    others = np.flatnonzero(~fits)
    drawn = others[np.random.default_rng(0).permutation(len(others))[:most]]
    return rows[fits | np.isin(np.arange(len(rows)), drawn)].reset_index(drop=True)


def forecasts_without(
    source: str, lines: Sequence[tuple[ModelLine, Rows]], public: Path, bundle: Path
) -> list[tuple[ModelLine, Rows]]:
    """The rows of each line with new forecasts, of processes that leave a source out."""
    known: dict[object, Answer] = {}
    with tempfile.TemporaryDirectory() as folder, leaving_out(source), processes() as pool:
        if source.casefold() in TRAINED_ON:
            bundle = pool.submit(train_without, source, public, Path(folder) / "bundle").result()
        again = [(x, with_fitted_hosts(x, rows, bundle, pool, Path(folder))) for x, rows in lines]
        return [(x, add_forecasts(without_forecasts(r), bundle, known, pool)) for x, r in again]


def without_forecasts(rows: Rows) -> Rows:
    """The rows without the columns that ``add_forecasts`` adds."""
    return rows.drop(columns=[*MEASURED, *INTERVAL, ASSUMED], errors="ignore")


def train_without(source: str, public: Path, folder: Path) -> Path:
    """Train a bundle quickly on the rows that the shipped one was trained on, but a source's.

    Returns its folder.
    """
    models: dict[str, FamilyModel] = {}
    gpus: dict[str, Gpu] = {}
    for name, table in read_ops(public).items():
        others = TEACHERS.get(name, set()) - {source.casefold()}
        rows = table[table[PUBLISHER].isin(others)].reset_index(drop=True)
        if len(rows):
            own = gpus_of(rows)
            some = subsample_evenly(rows, KNOWN_ROWS).reset_index(drop=True)
            prepared = prepare(some, families()[name], own)
            models[name] = quick_model_with_intervals(prepared, default_options(prepared.table))
            gpus |= own
    Bundle(models=widen_unseen_offsets(models), gpus=gpus, anchors={}).save(folder)
    return folder


def quick_model_with_intervals(prepared: Prepared, options: Options) -> FamilyModel:
    """A model of all rows without cross-validation, but with an envelope and intervals.

    ``offsets`` are quantiles of the errors on a fifth of the shapes, by a model of the others.
    """
    known, held = group_split(prepared.table.group, HELD_SHARE, seed=0)
    error = log_error(learn_quickly(prepared, known, options), prepared, held)
    low, high = (float(q) for q in np.quantile(error, [0.1, 0.9]))
    seen = (min(low, 0.0), max(high, 0.0))
    return replace(
        learn_quickly(prepared, np.arange(len(prepared.kind)), options),
        offsets=seen,
        unseen_offsets=unseen_offsets(prepared, options, seen),
        envelope=prepared.envelope,
    )
