"""Measures steps of sharded DLRMs on this CPU with gloo processes, every model in ROUNDS rounds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from itercast.extras.recommenders.sharded_model import ShardedModel
from itercast.extras.recommenders.tables.placement import shards
from itercast.extras.recommenders.tasks import Candidate
from itercast.microbench.processes.ranks import start_ranks, threads_of
from itercast.microbench.processes.watch import log_tail, never, watch
from itercast.microbench.store import Row

ROUNDS = 2
STEPS = 6  # of a model in a round
LIMIT_S = 1800.0


def measurable(candidate: Candidate, ranks: int) -> ShardedModel:
    """Describes a candidate (model and sharding) to the processes that run it."""
    model = candidate.model
    numbered = enumerate(zip(model.tables, candidate.sharding, strict=True))
    held = tuple(s for i, (t, place) in numbered for s in shards(t, i, place, ranks))
    return ShardedModel(**{f.name: getattr(model, f.name) for f in fields(model)}, shards=held)


def measure(
    candidates: Sequence[Candidate],
    ranks: int,
    folder: Path,
    together: int,
    usual_us: float,
    progress: Callable[[int], None],
) -> list[tuple[float, ...]]:
    """Median step times in us of each candidate by round; ``together`` candidates take turns.

    Corrected for the speed of the machine: time * usual_us / anchor_us, where the anchor is a
    reference task timed beside the steps. Equal candidates of one turn are measured once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = [asdict(measurable(c, ranks)) for c in candidates]
    alias = [i - i % together + models[i - i % together :].index(m) for i, m in enumerate(models)]
    order = {
        "threads": threads_of(ranks),
        "steps": STEPS,
        "rounds": ROUNDS,
        "models": models,
        "groups": [sorted(set(alias[i : i + together])) for i in range(0, len(alias), together)],
    }
    rounds: dict[int, list[float]] = {}
    for line in _run(order, ranks, folder, ROUNDS * len(set(alias)), progress):
        speed = usual_us / np.median(line["anchors_us"])
        rounds.setdefault(line["model"], []).append(float(np.median(line["times_us"]) * speed))
    return [tuple(rounds[i]) for i in alias]


def _run(
    order: Row, ranks: int, folder: Path, wanted: int, progress: Callable[[int], None]
) -> list[Row]:
    """The lines that the ranks write for an order; RuntimeError if there are fewer than wanted."""
    out, order_file, log = (folder / n for n in ("times.jsonl", "order.json", "ranks.log"))
    out.unlink(missing_ok=True)
    order_file.write_text(json.dumps({**order, "out": str(out)}))

    def done() -> int:
        count = len(out.read_text().splitlines()) if out.is_file() else 0
        progress(count)
        return count

    worker = "itercast.extras.recommenders.sharding_worker"
    process = start_ranks(worker, {"order": str(order_file)}, ranks, log=log)
    ended = watch(process, done, never, time.monotonic() + LIMIT_S)
    if done() < wanted:
        raise RuntimeError(f"measured {done()} of {wanted} shardings, {ended}: {log_tail(log)}")
    return [json.loads(line) for line in out.read_text().splitlines()]
