"""The order in which a worker measures points: every family gets its share of time.

No point is measured twice, except that every tenth point is measured again later.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from itercast.capture.base.yaml_text import made_of
from itercast.microbench import store
from itercast.microbench.hardware.machine import slow_dtypes
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family, Point
from itercast.microbench.ops.step.collective import measured_op
from itercast.microbench.processes.ranks import rank0_value
from itercast.microbench.store import Facts, Row
from itercast.microbench.sweep.captured_points import alternate, read_points
from itercast.microbench.sweep.gpu_space import grid, on_gpu
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.rows import make_row

RETEST_EVERY = 10  # points
MIN_RETEST_AGE_FRAC = 0.3  # of the budget, between the two measurements
SLOW_FLOPS = 2e8  # no assumption: a fifth of a second in the slowest layout of such products
FIRST_COST_S = 0.01  # of a point, before one of its family was measured
FIRST_COST_ON_DEMAND_S = 3.0


class Chosen(NamedTuple):
    """A point to measure; ``repeat``: how often it was measured before."""

    family: Family
    point: Point
    repeat: int


class Sweep:
    """Chooses points such that every family gets its share of time.

    Where several ranks measure together, each calls ``choose`` and gets the same point: the next
    one that rank 0 has no row of.
    """

    def __init__(self, order: WorkerOrder, done: set[str]) -> None:
        self.order = order
        self.done = done  # keys of rows that are there
        self.cost_s = dict.fromkeys(order.families, 0.0)  # time spent by family
        self.charged_s = dict.fromkeys(order.families, 0.0)  # of points chosen, not yet measured
        self.points = dict.fromkeys(order.families, 0)
        on_cpu = order.device == "cpu"
        swept = [families()[n] for n in order.families]
        self.weight = {f.name: f.weight if on_cpu else f.gpu_sweep.weight for f in swept}
        self.retests: deque[tuple[float, Family, Point]] = deque()
        self.count = 0
        self.streams = {n: self._stream(n) for n in order.families}

    def _stream(self, name: str) -> Iterator[Point]:
        """A family's points: only those in the order's file if it says so, else all."""
        order = self.order
        if order.only:
            return iter(read_points(Path(order.points), name))
        on_cpu = order.device == "cpu" or order.together
        gpu = None if on_cpu else made_of(Gpu, order.hardware, "order")
        return space(name, Path(order.points), gpu, order.seed)

    def choose(self, now_s: float) -> Chosen | None:
        """The next point to measure, new or due for its second measurement; None at the end."""
        age_s = MIN_RETEST_AGE_FRAC * self.order.budget_s
        if self.retests and now_s - self.retests[0][0] > age_s:
            _, family, point = self.retests.popleft()
            return Chosen(family, point, 1)
        fresh = self._fresh()
        if fresh is None:
            return None
        self.count += 1
        if self.count % RETEST_EVERY == 0:
            self.retests.append((now_s, *fresh))
        return Chosen(*fresh, 0)

    def choose_chunk(self, now_s: float, points: int, seconds: float) -> list[Chosen]:
        """Choose one to ``points`` points that usually take ``seconds`` together."""
        chosen: list[Chosen] = []
        left_s = min(self.order.budget_s - now_s, seconds)
        while len(chosen) < points and (left_s > 0 or not chosen):
            point = self.choose(now_s)
            if point is None:
                break
            chosen.append(point)
            left_s -= self.charge(point.family)
        return chosen

    def charge(self, family: Family) -> float:
        """Charge a family its points' mean cost for a chosen one; ``settle`` corrects it."""
        name = family.name
        settled_s = self.cost_s[name] - self.charged_s[name]
        first_s = FIRST_COST_ON_DEMAND_S if family.on_demand else FIRST_COST_S
        cost_s = settled_s / self.points[name] if self.points[name] else first_s
        self.cost_s[name] += cost_s
        self.charged_s[name] += cost_s
        return cost_s

    def settle(self, rows: Sequence[Facts]) -> None:
        """Replace what was charged by the cost of the rows that were measured."""
        for name, charged_s in self.charged_s.items():
            self.cost_s[name] -= charged_s
            self.charged_s[name] = 0.0
        for row in rows:
            self.cost_s[row["family"]] += row["cost_s"]
            self.points[row["family"]] += row["cache"] == "warm"

    def _fresh(self) -> tuple[Family, Point] | None:
        """The next unmeasured point of the family furthest behind its share; None at the end."""
        while self.streams:
            name = min(self.streams, key=lambda n: self.cost_s[n] / self.weight[n])
            family, point = families()[name], next(self.streams[name], None)
            if point is None:
                del self.streams[name]
                continue
            point = placed(point, self.order) if family.ranks > 1 else point
            key = self.row_keys(family, point, 0)["warm"]
            done = int(key in self.done or not self.is_of_this_lane(key))
            if not (rank0_value(done) if self.order.together else done):
                self.done.add(key)  # a random sweep may have a point twice
                return family, point
        return None

    def is_of_this_lane(self, key: str) -> bool:
        """Whether this lane measures the point of this key, among sweeps that share all points."""
        (sweep, sweeps), lanes = self.order.among, self.order.lanes
        return int(key, 16) % (sweeps * lanes) == sweep * lanes + self.order.lane

    def row_keys(self, family: Family, point: Point, repeat: int) -> dict[str, str]:
        """Keys of a point's rows by cache; collectives and GPUs' host calls are timed warm only."""
        row = {
            "family": family.name,
            "gpu": self.order.gpu,
            "threads": self.order.threads,
            "repeat": repeat,
            "point": asdict(point),
        }
        once = family.ranks > 1 or (family.on_host and self.order.device == "cuda")
        caches = ("warm",) if once else ("warm", "cold")
        return {cache: store.point_key({**row, "cache": cache}) for cache in caches}

    def row(self, chosen: Chosen, cache: str, measured: Facts) -> Row:
        """The row of a point and cache state; ``measured`` has its status, times and more."""
        family, point, repeat = chosen
        return make_row(
            self.order,
            family=family.name,
            params=asdict(point),
            repeat=repeat,
            key=self.row_keys(*chosen)[cache],
            timer="device" if self.order.device == "cuda" else "with_launch",
            measured={"cache": cache, **measured},
        )


def space(name: str, captured: Path, gpu: Gpu | None, seed: int) -> Iterator[Point]:
    """Points of a family, captured and swept in turn; on a GPU with its sizes and dtypes."""
    if gpu is None or gpu.kind == "cpu":
        family = families()[name]
        return alternate(captured, name, family.sweep(), seed, partial(_quick, family))
    swept = on_gpu(name, grid(name, seed), gpu, seed)

    def as_called(points: Iterator[Point]) -> Iterator[Point]:
        return on_gpu(name, points, gpu, seed, captured=True)

    return alternate(captured, name, swept, seed, as_called)


def _quick(family: Family, points: Iterator[Point]) -> Iterator[Point]:
    """The points but long ones in a dtype of 16 bits for which this CPU has no instructions."""
    slow = slow_dtypes()
    return (
        p for p in points if getattr(p, "dtype", "") not in slow or family.flops(p) <= SLOW_FLOPS
    )


def placed(point: Point, order: WorkerOrder) -> Point:
    """A collective's point over all ranks that torchrun started; on a CPU perhaps over fewer."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    divides = order.device == "cpu" and world % point.world_size == 0
    world_size = point.world_size if divides else world
    op = measured_op(point.op, order.device)
    return replace(point, op=op, world_size=world_size, ranks_per_node=local, node=order.gpu)


def finished_keys(root: Path, names: tuple[str, ...]) -> set[str]:
    """Keys of all rows under a root, in parts and in journals.

    Rows from a throttled GPU do not count: a resumed sweep measures their points again.
    """
    keys: set[str] = set()
    for name in names:
        rows = store.read_rows([root], name)
        keys |= set(rows["key"][rows["status"] != "throttled"]) if "key" in rows else set()
    for path in (root / ".journal").glob("*.jsonl"):
        journal = store.read_journal(path)
        keys |= {row["key"] for row in journal if row.get("status") != "throttled"}
    return keys
