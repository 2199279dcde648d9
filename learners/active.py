"""Chooses the points a second sweep should measure: where models disagree most, per second.

Each family gets time in proportion to its error on unseen shapes. Within a family, models that each
learned half of the shapes are compared: they differ most where few shapes were measured nearby (the
bundle's own interval has one width per family).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from itercast.learners.family_model import prepare
from itercast.learners.features.table import columns
from itercast.learners.models.training_table import Array, Table
from itercast.learners.models.trees import DEFAULTS
from itercast.learners.train import hardware_of, usable_rows
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family
from itercast.microbench.sweep.captured_points import points_file
from itercast.microbench.sweep.scheduler import space

MEMBERS = 4  # models that are compared
ROUNDS = 100  # boosting rounds of each
CANDIDATES = 3000  # points of a family that are ranked


def boosted(x: Array, label: Array, seed: int = 0) -> xgb.Booster:
    """Fit ROUNDS boosted trees on one thread."""
    options = {**DEFAULTS, "eta": 0.1, "objective": "reg:squarederror"}
    data = xgb.DMatrix(x, label=label)
    return xgb.train({**options, "nthread": 1, "seed": seed}, data, num_boost_round=ROUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How unsure models are of some rows: the standard deviation of their log forecasts, by row.

    ``error`` is their median absolute log error on shapes that they did not learn.
    """

    spread: Array
    error: float


def disagreement(table: Table, known: Array, candidates: Array) -> Disagreement:
    """Compare models on the rows ``candidates``, each fitted to half of the shapes of ``known``."""
    names = np.unique(table.group[known])
    guesses, misses = [], []
    for member in range(MEMBERS):
        half = np.random.default_rng(member).permutation(names)[: max(1, len(names) // 2)]
        learned = np.isin(table.group[known], half)
        trees = boosted(table.x[known[learned]], table.log_ratio[known[learned]], member)
        others = known[~learned] if not learned.all() else known
        misses.append(np.abs(trees.inplace_predict(table.x[others]) - table.log_ratio[others]))
        guesses.append(trees.inplace_predict(table.x[candidates]))
    error = float(np.median(np.concatenate(misses)))
    return Disagreement(spread=np.std(guesses, axis=0), error=error)


def point_ids(rows: pd.DataFrame, group: Array) -> Array:
    """A number per point of a sweep (shape, dtype, threads); warm and cold rows share it."""
    varying = rows[[c for c in ("dtype", "threads") if c in rows]].assign(group=group)
    return varying.groupby(list(varying), dropna=False).ngroup().to_numpy()


def expected_cost_s(x: Array, cost_s: Array, known: Array, candidates: Array) -> Array:
    """Predict the seconds that measuring candidates takes, from ``cost_s`` of the known rows."""
    trees = boosted(x[known], np.log(cost_s[known]))
    return np.exp(trees.inplace_predict(x[candidates]))


def sampling_keys(score: Array, seed: int) -> Array:
    """Keys to sort by, largest first, to sample without replacement in proportion to the scores.

    key = log(score) + Gumbel noise (https://arxiv.org/abs/2106.12059). Sorting by the score itself
    would take neighbouring points only.
    """
    noise = np.random.default_rng(seed).gumbel(size=len(score))
    return np.log(np.maximum(score, 1e-12)) + noise


def swept_families(names: Sequence[str] | None) -> list[str]:
    """Families that one process sweeps over unlimited sizes."""
    found = families().values()
    usual = [f.name for f in found if f.ranks == 1 and not f.on_demand and not f.on_host]
    return [n for n in usual if names is None or n in names]


def next_pass(
    roots: Sequence[Path],
    gpu: str,
    names: Sequence[str] | None,
    budget_s: float,
    seed: int,
) -> dict[str, list[Any]]:
    """Points by family that should take ``budget_s`` seconds in all, the most useful first.

    Half of the candidates are ops that random models of this seed call; they are captured once,
    under the first root. ValueError where none of the families has rows of the GPU.
    """
    tables = {
        name: rows[rows["gpu"] == gpu].reset_index(drop=True)
        for name, rows in usable_rows(roots, names).items()
        if name in swept_families(names) and "cost_s" in rows and (rows["gpu"] == gpu).any()
    }
    if not tables:
        where = ", ".join(map(str, roots))
        raise ValueError(f"gpu {gpu!r}: no rows of a sweep of it under {where}")
    ranked = {}
    for name, rows in tables.items():
        hardware = hardware_of(roots, rows)
        device = "cpu" if hardware[gpu].kind == "cpu" else "cuda"
        captured = points_file(roots[0], device, seed)
        points = candidates(families()[name], rows, hardware[gpu], captured, seed)
        ranked[name] = rank(families()[name], rows, points, hardware, seed)
    total = sum(r.error for r in ranked.values())
    return {name: r.first(budget_s * r.error / total) for name, r in ranked.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A family's candidates, the most useful first, with the expected seconds of each."""

    points: list[Any]
    cost_s: Array
    error: float

    def first(self, seconds: float) -> list[Any]:
        """The first points whose expected time fits into ``seconds``."""
        return self.points[: int((self.cost_s.cumsum() <= seconds).sum())]


def candidates(
    family: Family, rows: pd.DataFrame, gpu: Gpu, captured: Path, seed: int
) -> list[Any]:
    """Points of the family's sweep that no row has measured."""
    p = columns(rows, family)
    names = [f.name for f in fields(family.params)]
    measured = set(zip(*(getattr(p, n).tolist() for n in names), strict=True))
    points = dict.fromkeys(islice(space(family.name, captured, gpu, seed), CANDIDATES))
    return [point for point in points if tuple(asdict(point).values()) not in measured]


def rank(
    family: Family,
    rows: pd.DataFrame,
    points: Sequence[Any],
    hardware: Mapping[str, Gpu],
    seed: int,
) -> Ranked:
    """Rank candidates by disagreement per expected second of sweep."""
    gpu = hardware[str(rows["gpu"].iloc[0])]
    threads = gpu.sm_count if gpu.kind == "cpu" else 0
    new = pd.DataFrame([asdict(p) for p in points])
    new = new.assign(gpu=gpu.name, threads=threads, cache="warm", time_us=1.0)
    table = prepare(pd.concat([rows, new], ignore_index=True), family, hardware).table
    known, queried = np.split(np.arange(len(table.x)), [len(rows)])
    ids = point_ids(rows, table.group[known])
    cost_s = rows["cost_s"].groupby(ids).transform("sum").to_numpy()
    expected_s = expected_cost_s(table.x, cost_s, known, queried)
    unsure = disagreement(table, known, queried)
    order = np.argsort(-sampling_keys(unsure.spread / expected_s, seed))
    return Ranked(points=[points[i] for i in order], cost_s=expected_s[order], error=unsure.error)
