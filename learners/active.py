"""Which points a second pass should measure: where models of the first are least sure, by cost.

A family gets time as its forecasts of shapes never learned are wrong. Within a family the bundle's
interval cannot tell points apart, since it has one width: models that each learned half of the
shapes can, as they differ most where few shapes speak for a point.
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

from learners.family_model import prepare
from learners.features.table import columns
from learners.models import regressors
from learners.models.regressors import Array, Table
from learners.train import hardware_of, usable_rows
from microbench.hardware.spec import Gpu
from microbench.ops import families
from microbench.ops.family import Family
from microbench.sweep.captured_points import points_file
from microbench.sweep.scheduler import space

MEMBERS = 4
ROUNDS = 100
CANDIDATES = 3000  # of a family


def boosted(x: Array, label: Array, seed: int = 0) -> xgb.Booster:
    """Trees of a fixed number, quickly."""
    options = {**regressors.DEFAULTS, "eta": 0.1, "objective": "reg:squarederror"}
    data = xgb.DMatrix(x, label=label)
    return xgb.train({**options, "nthread": 1, "seed": seed}, data, num_boost_round=ROUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How unsure members are: the ``spread`` of their log forecasts at each row asked.

    ``error`` is the median log error of one on shapes it has not learned.
    """

    spread: Array
    error: float


def doubt(table: Table, known: Array, asked: Array) -> Doubt:
    """Of members that each learned half of the shapes known."""
    names = np.unique(table.group[known])
    guesses, missed = [], []
    for member in range(MEMBERS):
        half = np.random.default_rng(member).permutation(names)[: max(1, len(names) // 2)]
        own = np.isin(table.group[known], half)
        trees = boosted(table.x[known[own]], table.log_ratio[known[own]], member)
        others = known[~own] if not own.all() else known
        missed.append(np.abs(trees.inplace_predict(table.x[others]) - table.log_ratio[others]))
        guesses.append(trees.inplace_predict(table.x[asked]))
    return Doubt(spread=np.std(guesses, axis=0), error=float(np.median(np.concatenate(missed))))


def point_ids(rows: pd.DataFrame, group: Array) -> Array:
    """A number per point of a sweep: its shape, dtype and threads, warm and cold alike."""
    told_apart = rows[[c for c in ("dtype", "threads") if c in rows]].assign(group=group)
    return told_apart.groupby(list(told_apart), dropna=False).ngroup().to_numpy()


def expected_cost_s(x: Array, cost_s: Array, known: Array, asked: Array) -> Array:
    """What measuring will take, learned from what it took; ``cost_s`` is by row of its point."""
    trees = boosted(x[known], np.log(cost_s[known]))
    return np.exp(trees.inplace_predict(x[asked]))


def drawn(score: Array, seed: int) -> Array:
    """Keys to sort by, largest first: draws without replacement, likely as the score is large.

    Plain sorting would take the same corner of the space again and again. log score + Gumbel noise:
    arXiv:2106.12059.
    """
    noise = np.random.default_rng(seed).gumbel(size=len(score))
    return np.log(np.maximum(score, 1e-12)) + noise


def swept_families(names: Sequence[str] | None) -> list[str]:
    """Families that one process sweeps in sizes without end."""
    found = families().values()
    usual = [f.name for f in found if f.ranks == 1 and not f.on_demand and f.name != "host"]
    return [n for n in usual if names is None or n in names]


def next_pass(
    roots: Sequence[Path],
    gpu: str,
    names: Sequence[str] | None,
    budget_s: float,
    seed: int,
) -> dict[str, list[Any]]:
    """Points by family that are expected to take ``budget_s``, the most telling first.

    Half of the candidates are what models drawn with this seed call; they are captured once, under
    the first root. ValueError where no family of these has rows of the GPU.
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
    total = sum(found.error for found in ranked.values())
    return {name: found.first(budget_s * found.error / total) for name, found in ranked.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A family's candidates, the most telling first, and the seconds each is expected to take."""

    points: list[Any]
    cost_s: Array
    error: float

    def first(self, seconds: float) -> list[Any]:
        """As many as fit."""
        return self.points[: int((self.cost_s.cumsum() <= seconds).sum())]


def candidates(
    family: Family, rows: pd.DataFrame, gpu: Gpu, captured: Path, seed: int
) -> list[Any]:
    """Points of the family's space that no row is of."""
    p = columns(rows, family)
    names = [f.name for f in fields(family.params)]
    known = set(zip(*(getattr(p, n).tolist() for n in names), strict=True))
    found = dict.fromkeys(islice(space(family.name, captured, gpu, seed), CANDIDATES))
    return [one for one in found if tuple(asdict(one).values()) not in known]


def rank(
    family: Family,
    rows: pd.DataFrame,
    points: Sequence[Any],
    hardware: Mapping[str, Gpu],
    seed: int,
) -> Ranked:
    """Candidates by how much the members disagree on them in a second of sweep."""
    gpu = hardware[str(rows["gpu"].iloc[0])]
    threads = gpu.sm_count if gpu.kind == "cpu" else 0
    asked = pd.DataFrame([asdict(p) for p in points])
    asked = asked.assign(gpu=gpu.name, threads=threads, cache="warm", time_us=1.0)
    table = prepare(pd.concat([rows, asked], ignore_index=True), family, hardware).table
    old, new = np.split(np.arange(len(table.x)), [len(rows)])
    ids = point_ids(rows, table.group[old])
    cost_s = rows["cost_s"].groupby(ids).transform("sum").to_numpy()
    expected_s = expected_cost_s(table.x, cost_s, old, new)
    found = doubt(table, old, new)
    order = np.argsort(-drawn(found.spread / expected_s, seed))
    return Ranked(points=[points[i] for i in order], cost_s=expected_s[order], error=found.error)
