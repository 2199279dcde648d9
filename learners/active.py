"""Which points a second pass should measure: where models of the first disagree, by cost.

The bundle's own interval cannot tell: it has one width for a family. Models that each learned half
of the shapes differ most where few shapes speak for a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from learners import fit
from learners.fit import Array, Table
from learners.model import prepare
from learners.table import columns
from learners.train import hardware_of, usable_rows
from microbench.hardware.spec import Gpu
from microbench.ops import families
from microbench.ops.family import Family
from microbench.sweep import space
from microbench.zoo import points_file

MEMBERS = 4
ROUNDS = 100
CANDIDATES = 3000  # of a family


def boosted(x: Array, label: Array, seed: int = 0) -> xgb.Booster:
    """Trees of a fixed number, quickly."""
    options = {**fit.DEFAULTS, "eta": 0.1, "objective": "reg:squarederror"}
    data = xgb.DMatrix(x, label=label)
    return xgb.train({**options, "nthread": 1, "seed": seed}, data, num_boost_round=ROUNDS)


def disagreement(table: Table, known: Array, asked: Array) -> Array:
    """Standard deviation of log forecasts at rows asked, each member's from half of the shapes."""
    names = np.unique(table.group[known])
    guesses = []
    for member in range(MEMBERS):
        half = np.random.default_rng(member).permutation(names)[: max(1, len(names) // 2)]
        own = known[np.isin(table.group[known], half)]
        trees = boosted(table.x[own], table.log_ratio[own], member)
        guesses.append(trees.inplace_predict(table.x[asked]))
    return np.std(guesses, axis=0)


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
    ranked: list[tuple[float, float, str, Any]] = []
    for name, rows in tables.items():
        hardware = hardware_of(roots, rows)
        device = "cpu" if hardware[gpu].kind == "cpu" else "cuda"
        captured = points_file(roots[0], device, seed)
        points = candidates(families()[name], rows, hardware[gpu], captured, seed)
        key, cost_s = ranks(families()[name], rows, points, hardware, seed)
        ranked += zip(key, cost_s, [name] * len(points), points, strict=True)
    ranked.sort(key=lambda one: -one[0])
    chosen: dict[str, list[Any]] = {}
    for _, cost_s, name, point in ranked:
        budget_s -= cost_s
        if budget_s < 0:
            break
        chosen.setdefault(name, []).append(point)
    return chosen


def candidates(
    family: Family, rows: pd.DataFrame, gpu: Gpu, captured: Path, seed: int
) -> list[Any]:
    """Points of the family's space that no row is of."""
    p = columns(rows, family)
    names = [f.name for f in fields(family.params)]
    known = set(zip(*(getattr(p, n).tolist() for n in names), strict=True))
    found = dict.fromkeys(islice(space(family.name, captured, gpu, seed), CANDIDATES))
    return [one for one in found if tuple(asdict(one).values()) not in known]


def ranks(
    family: Family,
    rows: pd.DataFrame,
    points: Sequence[Any],
    hardware: Mapping[str, Gpu],
    seed: int,
) -> tuple[Array, Array]:
    """Keys to sort candidates by, and the seconds each is expected to take."""
    gpu = hardware[str(rows["gpu"].iloc[0])]
    threads = gpu.sm_count if gpu.kind == "cpu" else 0
    asked = pd.DataFrame([asdict(p) for p in points])
    asked = asked.assign(gpu=gpu.name, threads=threads, cache="warm", time_us=1.0)
    table = prepare(pd.concat([rows, asked], ignore_index=True), family, hardware).table
    old, new = np.split(np.arange(len(table.x)), [len(rows)])
    ids = point_ids(rows, table.group[old])
    cost_s = rows["cost_s"].groupby(ids).transform("sum").to_numpy()
    expected_s = expected_cost_s(table.x, cost_s, old, new)
    return drawn(disagreement(table, old, new) / expected_s, seed), expected_s
