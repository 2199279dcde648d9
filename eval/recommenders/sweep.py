"""Measures on this CPU the ops of recommendation models, under the load their ranks make.

cores / threads processes measure the same point at once, so that every core is busy. The shapes on
which models are scored are measured twice, before and after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.eval.recommenders.points import dense_points, lookup_points, message_points
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import Speed, at_reference_us
from itercast.microbench import store
from itercast.microbench.processes.ranks import threads_of
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.collect import order_of, run_worker
from itercast.microbench.sweep.contention import measure_contention
from itercast.microbench.sweep.orders import Phase, spent_s

TEST_SEED = 1
SHARES: Mapping[str, float] = {"lookups": 0.5, "dense": 0.15, "messages": 0.2, "test": 0.15}
MIN_LEFT_FRAC = 0.05  # of a phase; for less no worker is started
Progress = Callable[[int, float], None]


def sweep(root: Path, budget_s: float, ranks: Sequence[int], progress: Progress) -> int:
    """Sweep until each part has spent its share of the budget; returns the number of new rows.

    ``root/train`` gets the rows to train on; ``root/test0`` and ``root/test1`` the first and second
    measurement of the shapes on which models are scored. Time that earlier runs spent counts.
    """
    facts = card_facts(root / "train", "cpu")
    if not facts["hardware"]["contention"] and threads_of(1) > 1:
        facts["hardware"]["contention"] = round(measure_contention(), 2)
    kinds = sorted({threads_of(n) for n in ranks})
    test = lookup_points(TEST_SEED)
    points = {"lookups": lookup_points(0), "dense": dense_points(0)}
    parts = [("test0", test, n, threads_of(n), SHARES["test"] / 2 / len(kinds)) for n in kinds]
    for name, some in points.items():
        parts += [("train", some, n, threads_of(n), SHARES[name] / len(kinds)) for n in kinds]
    messages, share = message_points(0), SHARES["messages"] / len(ranks)
    parts += [("train", messages, 1, n, share) for n in ranks]
    parts += [("test1", test, n, threads_of(n), SHARES["test"] / 2 / len(kinds)) for n in kinds]
    return sum(
        _measure(root / folder, some, threads, together, part * budget_s, facts, progress)
        for folder, some, threads, together, part in parts
    )


def _measure(
    root: Path,
    points: Mapping[str, Sequence[Any]],
    threads: int,
    ranks: int,
    budget_s: float,
    facts: dict[str, Any],
    progress: Progress,
) -> int:
    """Measure points, each on ``ranks`` processes at once, until the budget is spent."""
    phase = Phase(families=tuple(points), threads=threads, share=1.0, ranks=ranks)
    left_s = budget_s - spent_s(root, facts["hardware"]["name"], phase)
    if left_s < MIN_LEFT_FRAC * budget_s:
        return 0
    path = root / ".journal" / f"points-{'-'.join(points)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_points(path, points)
    order = order_of(root, "cpu", facts, phase, path, 0)
    run_worker(replace(order, budget_s=left_s, only=True), progress)
    return store.compact(root, facts)


def twice_measured(root: Path, bundle: Bundle, name: str) -> pd.DataFrame:
    """Shapes on which a family is scored: ``first_us``, ``second_us`` at the reference speed."""
    speed = Speed(anchors=bundle.anchors, sensitivity=bundle.models[name].sensitivity)
    found = []
    for part in ("test0", "test1"):
        rows = store.read_rows([root / part], name)
        rows = rows[rows["status"] == "ok"].drop_duplicates("key").set_index("key")
        found.append(rows.assign(us=at_reference_us(rows, speed)))
    first, second = found
    both = first.index.intersection(second.index)
    times = {"first_us": first.loc[both, "us"], "second_us": second.loc[both, "us"]}
    return first.loc[both].assign(**times).reset_index()
