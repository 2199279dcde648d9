"""A sweep worker: takes points family by family, times them, journals every row.

Where there are several ranks, all take the same points in the same order and time them at once,
as ranks of one job would; the slowest counts and rank 0 writes.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microbench import store
from microbench.collect import WorkerOrder, stack
from microbench.ops import families
from microbench.ops.family import Family, Workload
from microbench.ranks import join, slowest
from microbench.timing import Anchor, Clock, keep_freed_memory
from microbench.zoo import mixed, read_points

RETEST_EVERY = 10
MIN_RETEST_AGE_FRAC = 0.3
TIMES = ("time_us", "time_us_p20", "time_us_p80", "anchor_us", "cost_s")


class Sweep:
    """Points of all families such that every family gets the same share of time."""

    def __init__(self, order: WorkerOrder, done: set[str]) -> None:
        self.order = order
        self.done = done
        self.cost_s = dict.fromkeys(order.families, 0.0)
        self.streams: dict[str, Iterator[Any]] = {
            n: mixed(read_points(Path(order.points), n), families()[n].sweep(), order.seed)
            for n in order.families
        }

    def next_point(self) -> tuple[Family, Any] | None:
        """The next unmeasured point of the family that had least time; None when all ran dry."""
        while self.streams:
            name = min(self.streams, key=lambda n: self.cost_s[n])
            point = next(self.streams[name], None)
            if point is None:
                del self.streams[name]
                continue
            key = self.row_keys(families()[name], point, 0)[0]
            if key not in self.done:
                self.done.add(key)  # random sweeps may name a point twice
                return families()[name], point
        return None

    def row_keys(self, family: Family, point: Any, repeat: int) -> list[str]:
        """Keys of the warm and the cold row of a point."""
        row = {
            "family": family.name,
            "gpu": self.order.gpu,
            "threads": self.order.threads,
            "repeat": repeat,
            "point": asdict(point),
        }
        return [store.point_key({**row, "cache": cache}) for cache in ("warm", "cold")]


def finished_keys(root: Path, names: tuple[str, ...]) -> set[str]:
    """Keys of all points that are rows already, whole or in the journal."""
    keys: set[str] = set()
    for name in names:
        rows = store.read_rows([root], name)
        keys |= set(rows["key"]) if "key" in rows else set()
    for path in (root / ".journal").glob("*.jsonl"):
        keys |= {row["key"] for row in store.read_journal(path)}
    return keys


def failure_status(exc: Exception) -> str:
    """oom, unsupported or error."""
    text = str(exc).lower()
    if isinstance(exc, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "oom"
    if isinstance(exc, NotImplementedError) or "not implemented" in text:
        return "unsupported"
    return "error"


def build_together(order: WorkerOrder, family: Family, point: Any) -> Workload:
    """The point's workload, once every rank has built it."""
    failure: Exception | None = None
    try:
        workload = family.build(point, order.device)
    except Exception as exc:  # whatever it is becomes a row
        failure = exc
    if order.ranks > 1 and slowest([float(failure is not None)])[0] and failure is None:
        failure = RuntimeError("another rank could not build it")
    if failure is not None:
        raise failure
    return workload


def measure(
    sweep: Sweep, clock: Clock, anchor: Anchor | None, family: Family, point: Any, repeat: int
) -> list[dict[str, Any]]:
    """The warm and the cold row of one point; a failure is a row too."""
    order = sweep.order
    begin = time.monotonic()
    keys = sweep.row_keys(family, point, repeat)
    common = {
        **asdict(point),
        "family": family.name,
        "op": getattr(point, "op", family.name),
        "gpu": order.gpu,
        "stack": stack(),
        "timer": "device" if order.device == "cuda" else "with_launch",
        "threads": order.threads,
        "repeat": repeat,
        "run_id": order.run_id,
        "reason": "",
    }
    rows: list[dict[str, Any]] = []
    try:
        workload = build_together(order, family, point)
        before_us = anchor.time_us() if anchor else None
        for cache, key in zip(("warm", "cold"), keys, strict=True):
            timing = clock.time(workload, cache)
            measured = {**asdict(timing), "status": "ok"}
            if anchor and before_us:
                after_us = anchor.time_us()
                measured["anchor_us"] = (before_us * after_us) ** 0.5
                before_us = after_us
            rows.append({**common, "cache": cache, "key": key, **measured})
    except Exception as exc:  # the one place where anything may go wrong: keep it as a row
        failed = {"status": failure_status(exc), "reason": str(exc)[:200]}
        rows = [{**common, "cache": "warm", "key": keys[0], **failed}]
    cost_s = (time.monotonic() - begin) / len(rows)
    return [{**row, "cost_s": cost_s} for row in rows]


def agreed_s(order: WorkerOrder, now_s: float) -> float:
    """The latest clock of all ranks, so that all decide alike."""
    return slowest([now_s])[0] if order.ranks > 1 else now_s


def slowest_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times of the slowest rank; a point that failed on any rank failed."""
    times = [[float(row.get(name, math.inf)) for name in TIMES] for row in rows]
    times += [[math.inf] * len(TIMES)] * (2 - len(rows))  # a failure is one row, a success two
    together = slowest([t for row in times for t in row])
    found = []
    for number, row in enumerate(rows):
        values = together[number * len(TIMES) :][: len(TIMES)]
        measured = {n: t for n, t in zip(TIMES, values, strict=True) if n in row}
        if any(math.isinf(t) for t in measured.values()) and row["status"] == "ok":
            row = {**row, "status": "error", "reason": "another rank failed"}
            measured = {}
        found.append({**row, **measured})
    return found


def run(order: WorkerOrder) -> None:
    """Measure until the budget is spent; every tenth point again, far apart in time."""
    import torch  # lazy: the parent must not pay for it

    torch.set_num_threads(order.threads)
    torch.manual_seed(order.seed)
    if order.device == "cpu":
        keep_freed_memory()
    root = Path(order.root)
    rank = join(order.device)[0] if order.ranks > 1 else 0
    sweep = Sweep(order, finished_keys(root, order.families))
    if order.ranks > 1:
        torch.distributed.barrier()  # nobody writes before all have read
    journal = store.Journal(root, order.run_id) if rank == 0 else None
    clock = Clock(order.device, order.cache_bytes)
    anchor = Anchor() if order.device == "cpu" else None
    retests: deque[tuple[float, Family, Any]] = deque()
    begin = time.monotonic()
    count = 0
    while (now := agreed_s(order, time.monotonic() - begin)) < order.budget_s:
        old = bool(retests) and now - retests[0][0] > MIN_RETEST_AGE_FRAC * order.budget_s
        if old:
            _, family, point = retests.popleft()
        elif found := sweep.next_point():
            family, point = found
            count += 1
            if count % RETEST_EVERY == 0:
                retests.append((now, family, point))
        else:
            break
        rows = measure(sweep, clock, anchor, family, point, int(old))
        if order.ranks > 1:
            rows = slowest_rows(rows)
        if journal is not None:
            journal.append(rows)
        sweep.cost_s[family.name] += sum(row["cost_s"] for row in rows)
    if order.ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    run(WorkerOrder(**{**fields, "families": tuple(fields["families"])}))
