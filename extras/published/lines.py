"""The lines of the public benchmark (lines.yaml): which rows, how they are split, targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

import numpy as np
import pandas as pd

from itercast.capture.base.yaml_text import facts_of
from itercast.microbench.store import Row

Rows = pd.DataFrame
Mask = np.ndarray
FOLDS = 5
FIRST_FOLDERS = ("NeuSight", "aiconfigurator", "vidur", "nccl-tests")


def selected(rows: Rows, text: str) -> Mask:
    """The rows for which an expression over columns, as pandas evaluates it, is true; '': all.

    ``@one_in_five(column)`` is true for a fifth of a column's texts.
    """
    if not text:
        return np.ones(len(rows), dtype=bool)
    known = {"one_in_five": one_in_five}
    return np.array(rows.eval(text, engine="python", local_dict=known), dtype=bool)


def one_in_five(texts: pd.Series) -> pd.Series:
    """A fifth of the texts, by their checksum: every row of a text, or none."""
    return texts.astype(str).map(lambda text: crc32(text.encode()) % 5 == 0)


def permuted(names: Sequence[str] | np.ndarray) -> np.ndarray:
    """Names in an order that is drawn at random, always the same."""
    return np.asarray(np.random.default_rng(0).permutation(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Masks of the rows to learn from and of those to forecast; ``part`` names the GPU or op."""

    part: str
    known: Mask
    held: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """A line about single ops: which rows, how they are split, and the target.

    - ``folders``: whose rows are read, then ``selected`` by ``rows``; ``most`` of each GPU at
      random (0: all). Of those left out the ``scored`` are judged.
    - ``leave``: each group of rows alike in these columns is left out; ``rest_known``: but for
      those that are not scored. ``pooled``: all groups are one part, else each GPU is.
    - ``folds``: of the groups alike in these columns a fifth is left out, with ``all_folds`` each
      fifth in turn; ``each_gpu``: of one GPU at a time.
    - ``fewest``: which software is fastest is told of calls that so many were timed for (0: it is
      not); ``targets`` are then by metric, too.
    - ``targets`` are by part ("" for all), of the error statistic ``metric``. ``few``: numbers of
      measured rows of the held-out GPU that calibrate the forecast, each scored apart.

    Errors of splits with the same part are pooled.
    """

    name: str
    family: str
    folders: tuple[str, ...] = FIRST_FOLDERS
    rows: str = ""
    most: int = 0
    scored: str = ""
    leave: Sequence[str] = ()
    rest_known: bool = False
    pooled: bool = False
    folds: Sequence[str] = ()
    all_folds: bool = False
    each_gpu: bool = False
    metric: str = "mape_pct"
    targets: Mapping[str, float] = field(default_factory=dict)
    known_best: str = "none published"
    baselines: Sequence[str] = ("roofline", "nearest")
    few: Sequence[int] = ()
    fewest: int = 0

    def choose(self, rows: Rows) -> Rows:
        """The line's rows."""
        chosen = selected(rows, self.rows)
        if self.most:
            mixed = rows["gpu"].sample(frac=1, random_state=0)
            chosen &= np.asarray((mixed.groupby(mixed).cumcount() < self.most).sort_index())
        return rows[chosen].reset_index(drop=True)

    def splits(self, rows: Rows) -> Iterator[Split]:
        """The splits of these rows; no row is on both sides of one."""
        return self._left_out(rows) if self.leave else self._folds(rows)

    def _left_out(self, rows: Rows) -> Iterator[Split]:
        scored, group = selected(rows, self.scored), _codes(rows, self.leave)
        for one in np.unique(group[scored]):
            mine = group == one
            held = mine & scored
            part = "all" if self.pooled else str(rows["gpu"][mine].iloc[0])
            yield Split(part=part, known=~(held if self.rest_known else mine), held=held)

    def _folds(self, rows: Rows) -> Iterator[Split]:
        """Splits that hold out a fifth of the groups, or each fifth in turn (``all_folds``)."""
        scored, group = selected(rows, self.scored), _codes(rows, self.folds)
        names = permuted(np.unique(group))
        for fold in range(FOLDS if self.all_folds else 1):
            held = np.isin(group, names[fold::FOLDS])
            if not self.each_gpu:
                yield Split(part="all", known=~held, held=held & scored)
                continue
            for gpu in sorted(rows["gpu"][scored].unique()):
                mine = (rows["gpu"] == gpu).to_numpy()
                yield Split(part=str(gpu), known=~held & mine, held=held & mine & scored)


def _codes(rows: Rows, columns: Sequence[str]) -> np.ndarray:
    """A number for each row, the same for rows alike in these columns."""
    return rows.groupby(list(columns), dropna=False).ngroup().to_numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """A line about whole iterations: which rows, and targets by metric.

    - ``folder`` holds the published rows, of which those of ``sources`` (all, if none is named) are
      ``selected`` by ``rows``; of these all rows of ``most`` values of the column ``drawn``.
    - ``part`` is what is compared: "step", "backward" or "memory".
    - A target of None: the metric is reported without one.
    - ``calibrated``: forecasts are scaled by the median ratio of ``models.CALIBRATED_ON`` models.
    - ``fits_hosts``: selects rows that are not judged. On the fastest run of each of so many cases,
      those that a machine ran fastest, its host is fitted.
    """

    name: str
    targets: Mapping[str, float | None]
    folder: str = "iterations"
    sources: Sequence[str] = ()
    rows: str = ""
    drawn: str = ""
    most: int = 0
    part: str = "step"
    calibrated: bool = False
    fits_hosts: str = ""
    known_best: str = "none published"

    def choose(self, rows: Rows) -> Rows:
        """The line's rows."""
        chosen = selected(rows, self.rows)
        if self.sources:
            chosen &= rows["source"].isin(self.sources).to_numpy()
        if self.drawn:
            names = rows[self.drawn].where(chosen, "").astype(str)
            chosen = names.isin(permuted(sorted(set(names) - {""}))[: self.most]).to_numpy()
        return rows[chosen].reset_index(drop=True)

    def fits(self, rows: Rows) -> Mask:
        """The rows that hosts are fitted on."""
        return selected(rows, self.fits_hosts) & bool(self.fits_hosts)


@cache
def op_lines() -> tuple[OpLine, ...]:
    """All lines about single ops, in the order of the table."""
    return tuple(OpLine(**facts) for facts in _facts("ops"))


@cache
def model_lines() -> tuple[ModelLine, ...]:
    """All lines about whole models, in the order of the table."""
    return tuple(ModelLine(**facts) for facts in _facts("models"))


def _facts(kind: str) -> Iterator[Row]:
    """The facts of each line, merged with those of its group."""
    for group in facts_of(__file__)[kind]:
        for name, own in group.pop("lines").items():
            facts = {**group, "name": name, **(own if isinstance(own, dict) else {"rows": own})}
            yield {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """Errors in % of one part (a GPU, an op) of a line of the public benchmark, by learner.

    ``scores`` maps a learner to its error statistics; ``metric`` is the statistic that ``target``
    and ``known_best`` refer to.
    """

    line: str
    part: str
    metric: str
    target: float | None
    known_best: str
    rows: int
    seconds: float
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
