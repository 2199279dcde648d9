"""Replay a sweep with points chosen at random or actively.

`python -m itercast.eval.active ROOT --gpu NAME` runs it.

The points come from rows that were measured already; only their order is chosen anew. After each
pass, trees are fitted on the points taken so far and scored on held-out shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from itercast.learners.active import (
    boosted,
    disagreement,
    expected_cost_s,
    point_ids,
    sampling_keys,
    swept_families,
)
from itercast.learners.family_model import prepare
from itercast.learners.models.training_table import Array, Table, group_split
from itercast.learners.train import errors, hardware_of, usable_rows
from itercast.microbench.ops import families
from itercast.microbench.sweep.gpu_chunks import SAMPLES, SAMPLING_US

HELD_SHARE = 0.2
SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the pool's minutes: passes end there,
BUDGET_MIN = 10.0  # and here, the length of a usual sweep
POINT_S = 0.02  # time to build and probe a point, where rows have no cost_s
STRATEGIES = ("random", "active")
SEEDS = 3


@dataclass(slots=True, kw_only=True)
class Pool:
    """One family's measured rows, divided into held-out rows and points that can be taken.

    ``held`` are positions of held-out rows. ``ids`` is the point number of each row, ``cost_s`` the
    seconds that measuring this point took; ``cost_of`` has the same by point number. ``left`` are
    points not taken yet, ``spent_s`` the cost of those taken.
    """

    name: str
    table: Table
    ids: Array
    cost_s: Array
    cost_of: dict[int, float]
    held: Array
    left: list[int]
    taken: list[int] = field(default_factory=list)
    spent_s: float = 0.0

    def take(self, point: int) -> float:
        """Count a point as measured and return its cost in seconds."""
        self.taken.append(point)
        self.spent_s += self.cost_of[point]
        return self.cost_of[point]

    def known(self) -> Array:
        """Positions of the rows of all points taken so far."""
        return np.flatnonzero(np.isin(self.ids, self.taken))

    def errors(self) -> dict[str, float]:
        """Errors on the held-out rows of trees fitted on the points taken so far."""
        known, table = self.known(), self.table
        trees = boosted(table.x[known], table.log_ratio[known])
        guess = table.roofline_us[self.held] * np.exp(trees.inplace_predict(table.x[self.held]))
        return errors(guess, table.time_us[self.held])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Mean errors over families, and the number of points measured, after so many minutes."""

    minutes: float
    points: int
    median_ape_pct: float
    p90_ape_pct: float


def make_pools(root: Path, gpu: str, seed: int) -> list[Pool]:
    """A pool for every swept family with rows of the GPU; a fifth of the shapes is held out.

    Repeated measurements (``repeat`` > 0) are left out.
    """
    pools = []
    for name, rows in usable_rows([root], swept_families(None)).items():
        once = rows["repeat"].fillna(0) == 0 if "repeat" in rows else True
        rows = rows[(rows["gpu"] == gpu) & once].reset_index(drop=True)
        if not len(rows):
            continue
        table = prepare(rows, families()[name], hardware_of([root], rows)).table
        known, held = group_split(table.group, HELD_SHARE, seed)
        ids = point_ids(rows, table.group)
        cost_s = pd.Series(row_cost_s(rows)).groupby(ids).transform("sum").to_numpy()
        left = np.random.default_rng(seed).permutation(np.unique(ids[known])).tolist()
        pools.append(
            Pool(
                name=name,
                table=table,
                ids=ids,
                cost_s=cost_s,
                cost_of=dict(zip(ids.tolist(), cost_s.tolist(), strict=True)),
                held=held,
                left=left,
            )
        )
    if not pools:
        raise ValueError(f"gpu {gpu!r}: no rows of a sweep of it under {root}")
    return pools


def row_cost_s(rows: pd.DataFrame) -> Array:
    """Seconds that measuring each row took: its ``cost_s``, or an estimate from its time.

    The estimate is POINT_S plus the samples that a chunk of a GPU sweep would take.
    """
    if "cost_s" in rows and rows["cost_s"].notna().all():
        return rows["cost_s"].to_numpy(dtype=float)
    us = rows["time_us"].to_numpy(dtype=float)
    return POINT_S + 1e-6 * us * np.clip(SAMPLING_US / us, *SAMPLES)


def in_shares(
    pools: Sequence[Pool], queues: Sequence[Sequence[int]], shares: Sequence[float]
) -> Iterator[tuple[Pool, int]]:
    """Points of several queues, interleaved so that time is divided in proportion to ``shares``.

    The next point is of the pool with the least time spent relative to its share.
    """
    before = [pool.spent_s for pool in pools]
    left = {number: iter(queue) for number, queue in enumerate(queues)}
    while left:
        number = min(left, key=lambda n: (pools[n].spent_s - before[n]) / shares[n])
        point = next(left[number], None)
        if point is None:
            del left[number]
        else:
            yield pools[number], point


def at_random(pools: Sequence[Pool]) -> Iterator[tuple[Pool, int]]:
    """All points in random order; every family gets the same share of time, as in a sweep."""
    return in_shares(pools, [pool.left for pool in pools], [1.0] * len(pools))


def by_doubt(pools: Sequence[Pool], seed: int) -> Iterator[tuple[Pool, int]]:
    """All points as ``itercast.learners.active`` ranks them: most disagreement per second."""
    queues, shares = [], []
    for pool in pools:
        known, asked = pool.known(), np.flatnonzero(np.isin(pool.ids, pool.left))
        found = disagreement(pool.table, known, asked)
        cost_s = expected_cost_s(pool.table.x, pool.cost_s, known, asked)
        points = pd.Series(found.spread / cost_s).groupby(pool.ids[asked]).mean()
        order = np.argsort(-sampling_keys(points.to_numpy(), seed))
        queues.append(points.index.to_numpy()[order].tolist())
        shares.append(found.error)
    return in_shares(pools, queues, shares)


def replay(pools: Sequence[Pool], strategy: str, minutes: Sequence[float]) -> list[Pass]:
    """Errors after each of ``minutes``; the first pass is random.

    Each later pass of strategy "active" ranks the points left by models of those taken before.
    """
    found, spent_s = [], 0.0
    for number, until in enumerate(minutes):
        active = strategy == "active" and number > 0
        for pool, point in by_doubt(pools, number) if active else at_random(pools):
            if spent_s >= 60 * until:
                break
            spent_s += pool.take(point)
        for pool in pools:
            taken = set(pool.taken)
            pool.left = [point for point in pool.left if point not in taken]
        scores = [pool.errors() for pool in pools]
        found.append(
            Pass(
                minutes=until,
                points=sum(len(pool.taken) for pool in pools),
                median_ape_pct=float(np.mean([s["median_ape_pct"] for s in scores])),
                p90_ape_pct=float(np.mean([s["p90_ape_pct"] for s in scores])),
            )
        )
    return found


def passes(pools: Sequence[Pool]) -> list[float]:
    """Minutes after which errors are computed: SHARES of the whole pool, and BUDGET_MIN."""
    whole = sum(pool.cost_of[point] for pool in pools for point in pool.left) / 60
    return sorted({*(whole * share for share in SHARES), *([BUDGET_MIN] * (whole > BUDGET_MIN))})


def averaged(runs: Sequence[Sequence[Pass]]) -> list[Pass]:
    """The mean of several runs, pass by pass."""
    return [
        Pass(
            minutes=same[0].minutes,
            points=round(np.mean([p.points for p in same])),
            median_ape_pct=float(np.mean([p.median_ape_pct for p in same])),
            p90_ape_pct=float(np.mean([p.p90_ape_pct for p in same])),
        )
        for same in zip(*runs, strict=True)
    ]


def compare(root: Path, gpu: str, seeds: int) -> dict[str, list[Pass]]:
    """Mean errors of both strategies over ``seeds`` runs on the same pools."""
    runs: dict[str, list[list[Pass]]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(seeds):
        for strategy in STRATEGIES:
            pools = make_pools(root, gpu, seed)
            runs[strategy].append(replay(pools, strategy, passes(pools)))
    return {strategy: averaged(found) for strategy, found in runs.items()}


def minutes_for(passes: Sequence[Pass], median_ape_pct: float) -> float:
    """Minutes until the median error falls to ``median_ape_pct``; NaN if it never does.

    Between passes the logarithm of minutes is interpolated linearly in the error.
    """
    for before, after in pairwise(passes):
        if after.median_ape_pct <= median_ape_pct:
            x = [after.median_ape_pct, before.median_ape_pct]
            y = np.log([after.minutes, before.minutes])
            return float(np.exp(np.interp(median_ape_pct, x, y)))
    return float("nan")


def markdown(gpu: str, found: Mapping[str, Sequence[Pass]], seeds: int) -> str:
    """A Markdown table with a row per pass, and when active reaches random's last median error."""
    text = [
        f"Held-out shapes of {gpu}, means over families and {seeds} seeds, %",
        "",
        "| minutes | points random | median | p90 | points active | median | p90 |",
        "|" + " ---: |" * 7,
    ]
    for one, other in zip(found["random"], found["active"], strict=True):
        cells = [f"{one.minutes:.2f}"]
        for p in (one, other):
            cells += [str(p.points), f"{p.median_ape_pct:.1f}", f"{p.p90_ape_pct:.1f}"]
        text.append("| " + " | ".join(cells) + " |")
    last = found["random"][-1]
    needed = minutes_for(found["active"], last.median_ape_pct)
    text += [
        "",
        f"active reaches random's median of {last.minutes:.2f} minutes after {needed:.2f} minutes",
    ]
    return "\n".join(text) + "\n"


def plot(gpu: str, found: Mapping[str, Sequence[Pass]]) -> Any:
    """Plot median and 90th-percentile error against minutes of sweep, on log axes."""
    from matplotlib.figure import Figure  # lazy: a replay without a plot need not pay for it

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (strategy, some) in enumerate(found.items()):
        minutes = [p.minutes for p in some]
        for errors_pct, style, what in (
            ([p.median_ape_pct for p in some], "o-", "median"),
            ([p.p90_ape_pct for p in some], "s--", "p90"),
        ):
            axes.plot(minutes, errors_pct, style, color=f"C{number}", label=f"{strategy}, {what}")
    axes.set(xscale="log", yscale="log", xlabel="minutes of sweep", title=f"held-out shapes, {gpu}")
    axes.set(ylabel="absolute error, %")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Run the command line: replay, print the table, write it with a plot, log to MLflow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="dataset root")
    parser.add_argument("--gpu", required=True, help="GPU whose rows are replayed")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs to average over")
    parser.add_argument("--out", type=Path, default=Path("reports/active"), help="report folder")
    asked = parser.parse_args()
    from itercast.eval.tracking.logs import log_active

    found = compare(asked.root, asked.gpu, asked.seeds)
    text = markdown(asked.gpu, found, asked.seeds)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "active.md").write_text(text)
    plot(asked.gpu, found).savefig(asked.out / "active.png", dpi=120)
    log_active(asked.gpu, {s: [asdict(p) for p in some] for s, some in found.items()}, asked.out)
    Console().print(text)


if __name__ == "__main__":
    main()
