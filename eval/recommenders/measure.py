"""Measures steps of sharded DLRMs on this CPU with gloo processes, every model in ROUNDS rounds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from itercast.compose.parallel.placement import shards
from itercast.eval.recommenders.tasks import Candidate
from itercast.microbench.iterations.sharded_model import MeasuredTable, Shard, ShardedModel
from itercast.microbench.processes.ranks import start_ranks
from itercast.microbench.processes.watch import log_tail, never, watch

ROUNDS = 2
STEPS = 8  # of a model in a round
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Step times in us: a median per round, and mean stages with shape (ranks, stages)."""

    rounds_us: tuple[float, ...]
    stages_us: np.ndarray


def measurable(candidate: Candidate, ranks: int) -> ShardedModel:
    """Describes a candidate (model and sharding) to the processes that run it."""
    model, placed = candidate.model, list[Shard]()
    for i, (table, place) in enumerate(zip(model.tables, candidate.sharding, strict=True)):
        placed += shards(table, i, place, ranks)
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
        library=candidate.library,
    )


def measure(
    candidates: Sequence[Candidate],
    ranks: int,
    threads: int,
    folder: Path,
    together: int,
    usual_us: float,
    progress: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Measure steps of each candidate in each round, taking ``together`` candidates in turn.

    Corrected for the speed of the machine: time * usual_us / anchor_us, where the anchor is a
    reference task timed beside the steps. Equal candidates of one turn are measured once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, order_file, log = (folder / n for n in ("times.jsonl", "order.json", "ranks.log"))
    out.unlink(missing_ok=True)
    models = [asdict(measurable(c, ranks)) for c in candidates]
    alias = [i - i % together + models[i - i % together :].index(m) for i, m in enumerate(models)]
    order = {
        "threads": threads,
        "steps": STEPS,
        "rounds": ROUNDS,
        "out": str(out),
        "models": models,
        "groups": [sorted(set(alias[i : i + together])) for i in range(0, len(alias), together)],
    }
    order_file.write_text(json.dumps(order))

    def done() -> int:
        count = len(out.read_text().splitlines()) if out.is_file() else 0
        if progress is not None:
            progress(count)
        return count

    process = start_ranks(
        "itercast.microbench.iterations.sharding_worker", {"order": str(order_file)}, ranks, log=log
    )
    ended = watch(process, done, never, time.monotonic() + LIMIT_S)
    wanted = ROUNDS * len(set(alias))
    if done() < wanted:
        raise RuntimeError(f"measured {done()} of {wanted} shardings, {ended}: {log_tail(log)}")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = at_one_speed(lines, usual_us)
    return [found[i] for i in alias]


def at_one_speed(lines: Sequence[dict[str, Any]], usual_us: float) -> dict[int, Measured]:
    """Return median times by model and round, corrected for the machine's speed.

    time * usual_us / median anchor_us, with anchors (reference tasks) timed beside it. Stages are
    means over rounds.
    """
    rounds: dict[int, list[float]] = {}
    stages: dict[int, list[np.ndarray]] = {}
    for line in lines:
        speed, model = usual_us / np.median(line["anchors_us"]), line["model"]
        rounds.setdefault(model, []).append(float(np.median(line["times_us"]) * speed))
        stages.setdefault(model, []).append(speed * np.array(line["stages_us"]))
    return {
        m: Measured(rounds_us=tuple(rounds[m]), stages_us=np.mean(stages[m], axis=0))
        for m in rounds
    }
