"""What a sweep measures next: fair shares of time, nothing twice but every tenth point later."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.hardware.spec import Gpu, gpu_from_dict
from microbench.ops import families
from microbench.ops.family import Family
from microbench.processes.ranks import agree
from microbench.sweep.captured_points import mixed, read_points
from microbench.sweep.gpu_space import grid, on_gpu
from microbench.sweep.orders import WorkerOrder, stack

RETEST_EVERY = 10
MIN_RETEST_AGE_FRAC = 0.3
FIRST_GUESS_S = 0.01  # of what a point costs in a chunk
FIRST_GUESS_ON_DEMAND_S = 3.0
Chosen = tuple[Family, Any, int]  # the point and how often it was measured before


class Sweep:
    """Points of all families such that every family gets its share of time.

    With several ranks every rank calls ``choose`` and gets what rank 0 has not measured yet.
    """

    def __init__(self, order: WorkerOrder, done: set[str]) -> None:
        self.order = order
        self.done = done
        self.cost_s = dict.fromkeys(order.families, 0.0)
        self.charged_s = dict.fromkeys(order.families, 0.0)
        self.points = dict.fromkeys(order.families, 0)
        on_cpu = order.device == "cpu"
        known = [families()[n] for n in order.families]
        self.weight = {f.name: f.weight if on_cpu else f.gpu_weight for f in known}
        self.retests: deque[tuple[float, Family, Any]] = deque()
        self.count = 0
        self.streams = {n: self._stream(n) for n in order.families}

    def _stream(self, name: str) -> Iterator[Any]:
        """The points asked for, in their order; else all of the family's space."""
        order = self.order
        if order.only:
            return iter(read_points(Path(order.points), name))
        on_cpu = order.device == "cpu" or order.together
        gpu = None if on_cpu else gpu_from_dict(order.hardware, "order")
        return space(name, Path(order.points), gpu, order.seed)

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

    def charge(self, family: Family) -> float:
        """Count a chosen point, ahead of ``settle``, as what its family's points cost so far."""
        name = family.name
        known_s = self.cost_s[name] - self.charged_s[name]
        guess_s = FIRST_GUESS_ON_DEMAND_S if family.on_demand else FIRST_GUESS_S
        cost_s = known_s / self.points[name] if self.points[name] else guess_s
        self.cost_s[name] += cost_s
        self.charged_s[name] += cost_s
        return cost_s

    def settle(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows were measured: their cost counts instead of what was charged."""
        for name, charged_s in self.charged_s.items():
            self.cost_s[name] -= charged_s
            self.charged_s[name] = 0.0
        for row in rows:
            self.cost_s[row["family"]] += row["cost_s"]
            self.points[row["family"]] += row["cache"] == "warm"

    def _fresh(self) -> tuple[Family, Any] | None:
        """The next unmeasured point of the family that had least time; None when all ran dry."""
        while self.streams:
            name = min(self.streams, key=lambda n: self.cost_s[n] / self.weight[n])
            family, point = families()[name], next(self.streams[name], None)
            if point is None:
                del self.streams[name]
                continue
            point = placed(point, self.order.gpu) if family.ranks > 1 else point
            key = self.row_keys(family, point, 0)["warm"]
            known = int(key in self.done)
            if not (agree(known) if self.order.together else known):
                self.done.add(key)  # random sweeps may name a point twice
                return family, point
        return None

    def row_keys(self, family: Family, point: Any, repeat: int) -> dict[str, str]:
        """Keys of a point's rows by cache; collectives and a GPU's host are timed warm only."""
        row = {
            "family": family.name,
            "gpu": self.order.gpu,
            "threads": self.order.threads,
            "repeat": repeat,
            "point": asdict(point),
        }
        once = family.ranks > 1 or (family.name == "host" and self.order.device == "cuda")
        caches = ("warm",) if once else ("warm", "cold")
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


def space(name: str, captured: Path, gpu: Gpu | None, seed: int) -> Iterator[Any]:
    """Captured points and the family's sweep in turn; on a GPU both in its sizes and dtypes."""
    if gpu is None or gpu.kind == "cpu":
        return mixed(captured, name, families()[name].sweep(), seed)
    swept = on_gpu(name, grid(name, seed), gpu, seed)

    def as_called(points: Iterator[Any]) -> Iterator[Any]:
        return on_gpu(name, points, gpu, seed, captured=True)

    return mixed(captured, name, swept, seed, as_called)


def placed(point: Any, node: str) -> Any:
    """A collective's point on the ranks that torchrun started."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return replace(point, world_size=world, ranks_per_node=local, node=node)


def finished_keys(root: Path, names: tuple[str, ...]) -> set[str]:
    """Keys of all points that are rows already, whole or in the journal.

    What was measured on a throttled GPU is not finished: a resumed sweep measures it again.
    """
    keys: set[str] = set()
    for name in names:
        rows = store.read_rows([root], name)
        keys |= set(rows["key"][rows["status"] != "throttled"]) if "key" in rows else set()
    for path in (root / ".journal").glob("*.jsonl"):
        journal = store.read_journal(path)
        keys |= {row["key"] for row in journal if row.get("status") != "throttled"}
    return keys
