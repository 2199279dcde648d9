"""Measures sharded DLRMs with gloo processes on this CPU; rounds over all of them are repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Median times of a step in us, one per round, and of its stages by rank (ranks, stages)."""

    rounds_us: tuple[float, ...]
    stages_us: np.ndarray


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
        optimizer=model.optimizer,
    )


def measure(
    candidates: Sequence[Candidate],
    ranks: int,
    threads: int,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Measure a step of each candidate, once per round.

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


def at_one_speed(lines: Sequence[dict[str, Any]]) -> list[Measured]:
    """Return median times by model and round, corrected for the machine's speed.

    time * median of all anchors / median of the anchors (reference tasks) timed beside it. Stages
    are means over rounds.
    """
    usual_us = float(np.median(np.concatenate([line["anchors_us"] for line in lines])))
    rounds: dict[int, list[float]] = {}
    stages: dict[int, list[np.ndarray]] = {}
    for line in lines:
        speed, model = usual_us / np.median(line["anchors_us"]), line["model"]
        rounds.setdefault(model, []).append(float(np.median(line["times_us"]) * speed))
        stages.setdefault(model, []).append(speed * np.array(line["stages_us"]))
    return [
        Measured(rounds_us=tuple(rounds[m]), stages_us=np.mean(stages[m], axis=0))
        for m in sorted(rounds)
    ]
