"""The public benchmark: issue lines as splits of imported rows, ours beside baselines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from eval.bench_baselines import BASELINES
from learners import fit
from learners.blend import fit_hidden
from learners.calibration import Calibration
from learners.local import coordinates
from learners.model import Prepared, learn, prepare
from learners.train import errors
from microbench.hardware.spec import load_gpu
from microbench.ops import families
from microbench.ops.family import Family

log = logging.getLogger(__name__)
Rows = pd.DataFrame
Mask = np.ndarray
FOLDS = 5
TAIL_BYTES = 16 * 2**20
BASELINE_ROWS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows to learn from and rows to forecast; ``part`` names the system or the op."""

    part: str
    known: Mask
    held: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table: which rows, how they are split, what is to be reached.

    ``targets`` is by part; ``metric`` is the error it is about. Splits with the same ``part`` are
    folds of one figure. ``few``: so many of the rows left out calibrate the forecasts, drawn at
    random; the others are judged.
    """

    name: str
    family: str
    metric: str
    targets: Mapping[str, float]
    known_best: str
    choose: Callable[[Rows], Mask]
    splits: Callable[[Rows], Iterator[Split]]
    baselines: tuple[str, ...] = ("roofline", "nearest", "mlp")
    few: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Errors of one part of a line, by learner."""

    line: str
    part: str
    metric: str
    target: float | None
    known_best: str
    rows: int
    seconds: float
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def run_line(line: Line, rows: Rows) -> Iterator[Result]:
    """Fit and judge each split; parts are reported when all their folds are done."""
    rows = rows[line.choose(rows)].reset_index(drop=True)
    gpus = {str(g): load_gpu(str(g)) for g in rows["gpu"].unique()}
    family = families()[line.family]
    prepared = prepare(rows, family, gpus)
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
            scores[name] = errors(guess[good], truth[good])
        yield Result(
            line=line.name,
            part=part,
            metric=line.metric,
            target=line.targets.get(part, line.targets.get("")),
            known_best=line.known_best,
            rows=sum(len(f[0]) for f in folds),
            seconds=spent[part],
            scores=scores,
        )


def forecasts(
    line: Line, prepared: Prepared, rows: Rows, known: np.ndarray, held: np.ndarray
) -> dict[str, np.ndarray]:
    """Times in us of the held rows by learner; baselines answer a sample, NaN elsewhere."""
    table = prepared.table
    options = fit.default_options(table.take(known))
    if np.isin(prepared.gpu[held], np.unique(prepared.gpu[known])).any():
        ours = learn(prepared, known, options).predict_us(held)
    else:  # only the rounds that do not see which GPU it is answer for a new one
        hidden = fit_hidden(table.take(known), options)
        strange = np.ones(len(held), dtype=bool)
        ours = hidden.predict(table.x[held], table.roofline_us[held], strange)
    if line.few:
        ours = calibrated(rows.iloc[held], families()[line.family], ours, line.few)
    out = {"itercast": ours}
    rng = np.random.default_rng(0)
    some = np.sort(rng.permutation(len(held))[:BASELINE_ROWS])
    for name in line.baselines:
        guess = np.full(len(held), np.nan)
        guess[some] = BASELINES[name](table, rows, known, held[some])
        out[name] = guess
    return out


def calibrated(rows: Rows, family: Family, guess: np.ndarray, few: int) -> np.ndarray:
    """Forecasts pulled towards ``few`` of the rows, which are NaN themselves."""
    chosen = np.random.default_rng(0).permutation(len(rows))[:few]
    kind, at = coordinates(rows.reset_index(drop=True), family)
    left = np.log(rows["time_us"].to_numpy(dtype=float) / guess)
    found = Calibration(kind=kind[chosen], at=at[chosen], value=left[chosen])
    pulled = guess * np.exp(found.correction(kind, at)[0])
    pulled[chosen] = np.nan
    return np.asarray(pulled)


def read_public(root: Path) -> dict[str, Rows]:
    """Rows of every family, imported from the folder's NeuSight, AIConfigurator, Vidur, nccl-tests.

    Nothing is written; ValueError where the folder lacks one of them.
    """
    from microbench.importers import aiconfigurator, nccl_tests, neusight, vidur

    frames: dict[str, list[Rows]] = {}
    readers = {
        "NeuSight": neusight.read,
        "aiconfigurator": aiconfigurator.read,
        "vidur": vidur.read,
        "nccl-tests": nccl_tests.read,
    }
    for name, read in readers.items():
        for family, rows in read(root / name).rows.items():
            ok = rows[rows["status"] == "ok"].assign(source=name)
            frames.setdefault(family, []).append(ok)
    return {family: pd.concat(parts, ignore_index=True) for family, parts in frames.items()}
