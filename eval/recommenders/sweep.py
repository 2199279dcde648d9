"""Measures on this CPU the ops of recommendation models, under the load their ranks make.

cores / threads processes measure the same point at once, so that every core is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from itercast.eval.recommenders.points import dense_points, lookup_points, message_points
from itercast.microbench import store
from itercast.microbench.ops.family import Point
from itercast.microbench.processes.ranks import threads_of
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.collect import MIN_LEFT_FRAC, order_of, run_worker
from itercast.microbench.sweep.contention import measure_contention
from itercast.microbench.sweep.orders import Phase, spent_s

Progress = Callable[[int, float], None]


def sweep(root: Path, budget_s: float, ranks: Sequence[int], progress: Progress) -> int:
    """Sweep until each part has spent its share of the budget; returns the number of new rows.

    Time that earlier runs spent counts.
    """
    facts = card_facts(root, "cpu")
    if not facts["hardware"]["contention"] and threads_of(1) > 1:
        facts["hardware"]["contention"] = round(measure_contention(), 2)
    threads = sorted({threads_of(n) for n in ranks})
    alone, together = [(n, threads_of(n)) for n in threads], [(1, n) for n in ranks]
    parts = (
        (0.6, lookup_points(), alone),
        (0.2, dense_points(), alone),
        (0.2, message_points(), together),
    )
    for share, points, groups in parts:
        for count, processes in groups:
            part = share / len(groups)
            phase = Phase(families=tuple(points), threads=count, share=part, ranks=processes)
            _measure(root, points, phase, budget_s, facts, progress)
    return store.compact(root, facts)


def _measure(
    root: Path,
    points: Mapping[str, Sequence[Point]],
    phase: Phase,
    budget_s: float,
    facts: Row,
    progress: Progress,
) -> None:
    """Measure points until the phase's share of the budget is spent."""
    left_s = phase.share * budget_s - spent_s(root, facts["hardware"]["name"], phase)
    if left_s < MIN_LEFT_FRAC * phase.share * budget_s:
        return
    path = root / ".journal" / f"points-{'-'.join(points)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_points(path, points)
    order = order_of(root, "cpu", facts, phase, path, 0)
    run_worker(replace(order, budget_s=left_s, only=True), progress)
