"""Measures sharded DLRMs with gloo processes on this CPU; rounds over all of them are repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compose.parallel.placement import shards
from eval.recommenders.tasks import Candidate
from microbench.iterations.sharded_dlrm import MeasuredShard, MeasuredTable, ShardedModel
from microbench.processes.ranks import start_ranks
from microbench.processes.watch import log_tail, never, watch

ROUNDS = 2
STEPS = 5  # of a candidate in a round
LIMIT_S = 1800.0


def measurable(candidate: Candidate, ranks: int) -> ShardedModel:
    """Describes a candidate (model and sharding) to the processes that run it."""
    model, placed = candidate.model, []
    for i, (table, place) in enumerate(zip(model.tables, candidate.sharding, strict=True)):
        placed += [MeasuredShard(**asdict(s)) for s in shards(table, i, place, ranks)]
    return ShardedModel(
        batch=model.batch,
        features=model.features,
        bottom=(*model.bottom,),
        top=(*model.top,),
        tables=tuple(
            MeasuredTable(rows=t.rows, dim=t.dim, pooling=int(t.pooling), skew=t.stream.skew)
            for t in model.tables
        ),
        shards=tuple(placed),
    )


def measure(
    candidates: Sequence[Candidate],
    ranks: int,
    threads: int,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[float, ...]]:
    """Median time of a step in us of each candidate, once per round.

    Times are corrected for the speed of the machine: times the median anchor of all, over the
    anchor beside the step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, order_file, log = (folder / n for n in ("times.jsonl", "order.json", "ranks.log"))
    out.unlink(missing_ok=True)
    order = {
        "threads": threads,
        "steps": STEPS,
        "rounds": ROUNDS,
        "out": str(out),
        "models": [asdict(measurable(c, ranks)) for c in candidates],
    }
    order_file.write_text(json.dumps(order))

    def done() -> int:
        count = len(out.read_text().splitlines()) if out.is_file() else 0
        if progress is not None:
            progress(count)
        return count

    process = start_ranks(
        "microbench.iterations.sharding_worker", {"order": str(order_file)}, ranks, log=log
    )
    ended = watch(process, done, never, time.monotonic() + LIMIT_S)
    wanted = ROUNDS * len(candidates)
    if done() < wanted:
        raise RuntimeError(f"measured {done()} of {wanted} shardings, {ended}: {log_tail(log)}")
    return at_one_speed([json.loads(line) for line in out.read_text().splitlines()])


def at_one_speed(lines: Sequence[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Return median step times in us, by model and round, corrected for the machine's speed.

    time * median of all anchors / median of the anchors (reference tasks) timed beside it.
    """
    usual_us = float(np.median(np.concatenate([line["anchors_us"] for line in lines])))
    found: dict[int, list[float]] = {}
    for line in lines:
        speed = usual_us / np.median(line["anchors_us"])
        found.setdefault(line["model"], []).append(float(np.median(line["times_us"]) * speed))
    return [tuple(found[model]) for model in sorted(found)]
