"""Run lines of the public benchmark about single ops: split imported rows, fit, score."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.extras.imports.base import Hints
from itercast.extras.imports.sources import read_source
from itercast.extras.published.baselines import CURVES, RANKERS, by_learner, calls
from itercast.extras.published.lines import LineResult, OpLine, Rows
from itercast.extras.published.readers import gpus_of, reader_of
from itercast.extras.software_ranking import SOFTWARE, software_metrics
from itercast.learners.family_model import Prepared, learn, learn_quickly, prepare
from itercast.learners.models.trees import default_options
from itercast.learners.train import errors
from itercast.learners.transfer.calibration import Calibration, points
from itercast.microbench.ops import families

log = logging.getLogger(__name__)
BASELINE_ROWS = 4000


def run_line(line: OpLine, rows: Rows) -> Iterator[LineResult]:
    """Fit and score every split of a line; yields a result for each part."""
    rows = line.choose(rows)
    prepared = prepare(rows, families()[line.family], gpus_of(rows))
    found: dict[str, list[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]]] = {}
    spent: dict[str, float] = {}
    for split in line.splits(rows):
        start = time.monotonic()
        known, held = np.flatnonzero(split.known), np.flatnonzero(split.held)
        measured = prepared.table.time_us[held]
        guesses = forecasts(line, prepared, rows, known, held)
        found.setdefault(split.part, []).append((held, guesses, measured))
        spent[split.part] = spent.get(split.part, 0.0) + time.monotonic() - start
        log.info("%s, %s: %.0f s", line.name, split.part, spent[split.part])
    for part, folds in found.items():
        names = folds[0][1]
        scores = {}
        for name in names:
            guess = np.concatenate([f[1][name] for f in folds])
            truth = np.concatenate([f[2] for f in folds])
            good = np.isfinite(guess)
            scores[name] = {} if name in RANKERS else errors(guess[good], truth[good])
            if line.fewest:
                asked = np.concatenate([f[0] for f in folds])
                which = calls(prepared)[asked], prepared.query.stack[asked]
                scores[name] |= software_metrics(*which, guess, truth, line.fewest)
        for metric in (line.metric, *(SOFTWARE if line.fewest else ())):
            target = line.targets.get(metric, line.targets.get(part, line.targets.get("")))
            yield LineResult(
                line=line.name,
                part=part,
                metric=metric,
                target=target,
                known_best=line.known_best,
                rows=sum(len(f[0]) for f in folds),
                seconds=spent[part],
                scores=scores,
            )


def forecasts(
    line: OpLine, prepared: Prepared, rows: Rows, known: np.ndarray, held: np.ndarray
) -> dict[str, np.ndarray]:
    """Forecasts in us of the held rows, by learner; NaN where a learner gives none.

    The learner "itercast" knows nothing measured on a held-out GPU (or dtype of a GPU); "stated
    rate" also knows the FLOP/s that large products are published to reach on it
    (``achieved_flops_per_s``). Baselines forecast a random sample of the rows only.
    """
    options = default_options(prepared.table.take(known))
    gpu, asked = prepared.query.gpu, prepared.query.take(held)
    new = not np.isin(gpu[held], np.unique(gpu[known])).any()
    out = {}
    if not (new or prepared.source_gpus(known).unseen(asked).all()):
        ours = learn(prepared, known, options).predict_us(held)
    else:
        model, family = learn_quickly(prepared, known, options), asked.family
        unstated = {n: replace(g, achieved_flops_per_s={}) for n, g in asked.gpus.items()}
        ours = model.predict(rows.iloc[held], family, unstated).time_us
        if family.at_achieved_rate:
            out["stated rate"] = model.predict(rows.iloc[held], family, asked.gpus).time_us
    out["itercast"] = ours
    for count in line.few:
        out[f"{count} rows"] = calibrated(prepared, held, ours, count)
    rng = np.random.default_rng(0)
    some = np.sort(rng.permutation(len(held))[:BASELINE_ROWS])
    for name in line.baselines:
        guess = np.full(len(held), np.nan)
        if name in RANKERS:
            guess = RANKERS[name](prepared, known, held)
        elif name in CURVES:
            guess[some] = CURVES[name](rows, known, held[some])
        else:
            guess[some] = by_learner(name, prepared, known, held[some])
        out[name] = guess
    return out


def calibrated(prepared: Prepared, held: np.ndarray, guess: np.ndarray, few: int) -> np.ndarray:
    """Forecasts ``guess`` corrected by ``few`` randomly drawn measured rows; NaN for these rows."""
    chosen = np.random.default_rng(1).permutation(len(held))[:few]
    mine = held[chosen]
    error = np.log(prepared.table.time_us[mine] / guess[chosen])
    at = points(prepared.at[held], prepared.table.roofline_us[held])
    known = Calibration(kind=prepared.kind[mine], at=at[chosen], value=error)
    shift, _ = known.correction(prepared.kind[held], at)
    found = np.asarray(guess * np.exp(shift))
    found[chosen] = np.nan
    return found


def read_folders(root: Path, folders: Iterable[str]) -> dict[str, Rows]:
    """Rows by family of some folders below ``root``; their column ``source`` names the folder.

    Nothing is written. ValueError where a folder is missing.
    """
    frames: dict[str, list[Rows]] = {}
    for name in folders:
        for family, rows in read_source(reader_of(name), root / name, Hints()).rows.items():
            ok = rows[rows["status"] == "ok"].assign(source=name)
            frames.setdefault(family, []).append(ok)
    return {family: pd.concat(parts, ignore_index=True) for family, parts in frames.items()}
