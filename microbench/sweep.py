"""What a sweep measures next: even shares of time, nothing twice but every tenth point later."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.collect import WorkerOrder, stack
from microbench.ops import families
from microbench.ops.family import Family
from microbench.ranks import agree
from microbench.zoo import mixed, read_points

RETEST_EVERY = 10
MIN_RETEST_AGE_FRAC = 0.3
Chosen = tuple[Family, Any, int]  # the point and how often it was measured before


class Sweep:
    """Points of all families such that every family gets the same share of time.

    With several ranks every rank calls ``choose`` and gets what rank 0 has not measured yet.
    """

    def __init__(self, order: WorkerOrder, done: set[str]) -> None:
        self.order = order
        self.done = done
        self.cost_s = dict.fromkeys(order.families, 0.0)
        self.retests: deque[tuple[float, Family, Any]] = deque()
        self.count = 0
        self.streams: dict[str, Iterator[Any]] = {
            n: mixed(read_points(Path(order.points), n), families()[n].sweep(), order.seed)
            for n in order.families
        }

    def choose(self, now_s: float) -> Chosen | None:
        """The next point; None when there is none left."""
        age_s = MIN_RETEST_AGE_FRAC * self.order.budget_s
        if self.retests and now_s - self.retests[0][0] > age_s:
            _, family, point = self.retests.popleft()
            return family, point, 1
        found = self._fresh()
        if found is None:
            return None
        self.count += 1
        if self.count % RETEST_EVERY == 0:
            self.retests.append((now_s, *found))
        return *found, 0

    def spend(self, family: Family, cost_s: float) -> None:
        """A point of the family took so long."""
        self.cost_s[family.name] += cost_s

    def _fresh(self) -> tuple[Family, Any] | None:
        """The next unmeasured point of the family that had least time; None when all ran dry."""
        while self.streams:
            name = min(self.streams, key=lambda n: self.cost_s[n])
            family, point = families()[name], next(self.streams[name], None)
            if point is None:
                del self.streams[name]
                continue
            point = placed(point, self.order.gpu) if family.ranks > 1 else point
            key = self.row_keys(family, point, 0)["warm"]
            known = int(key in self.done)
            if not (agree(known) if self.order.ranks > 1 else known):
                self.done.add(key)  # random sweeps may name a point twice
                return family, point
        return None

    def row_keys(self, family: Family, point: Any, repeat: int) -> dict[str, str]:
        """Keys of a point's rows by cache; nobody flushes caches before a collective."""
        row = {
            "family": family.name,
            "gpu": self.order.gpu,
            "threads": self.order.threads,
            "repeat": repeat,
            "point": asdict(point),
        }
        caches = ("warm",) if family.ranks > 1 else ("warm", "cold")
        return {cache: store.point_key({**row, "cache": cache}) for cache in caches}

    def row_facts(self, family: Family, point: Any, repeat: int) -> dict[str, Any]:
        """What rows of a point say, whatever is measured."""
        return {
            **asdict(point),
            "family": family.name,
            "op": getattr(point, "op", family.name),
            "gpu": self.order.gpu,
            "stack": stack(),
            "timer": "device" if self.order.device == "cuda" else "with_launch",
            "threads": self.order.threads,
            "repeat": repeat,
            "run_id": self.order.run_id,
            "reason": "",
        }


def placed(point: Any, node: str) -> Any:
    """A collective's point on the ranks that torchrun started."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return replace(point, world_size=world, ranks_per_node=local, node=node)


def finished_keys(root: Path, names: tuple[str, ...]) -> set[str]:
    """Keys of all points that are rows already, whole or in the journal."""
    keys: set[str] = set()
    for name in names:
        rows = store.read_rows([root], name)
        keys |= set(rows["key"]) if "key" in rows else set()
    for path in (root / ".journal").glob("*.jsonl"):
        keys |= {row["key"] for row in store.read_journal(path)}
    return keys
