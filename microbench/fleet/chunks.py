"""Deals the points of a fleet's plan into chunks, and simulates how long they take."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from itercast.microbench.cache_folder import cache_folder
from itercast.microbench.cases.registry import case
from itercast.microbench.fleet.plan import FleetPlan, Machines
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Point
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import points_file
from itercast.microbench.sweep.orders import HOST_SHARE
from itercast.microbench.sweep.scheduler import space

POINTS_PER_S = 30.0  # dealt; more than a machine measures, so that chunks last as planned
ITERATIONS_SHARE = 0.35  # no assumption: of a machine's time, where it also sweeps ops
TOGETHER_SHARE = 0.1  # of the time, for collectives
START_S = 8.0  # of a chunk besides its measuring: Python, torch, facts of the machine, the upload
OPS, HOST, TOGETHER, ITERATIONS = "ops", "host", "together", "iterations"
Plain = Row  # of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Points, or iterations, that one task measures in ``seconds``; its name is their hash."""

    machines: str
    kind: str
    families: tuple[str, ...]
    points: Mapping[str, Sequence[Plain]]
    seconds: float
    name: str
    number: int

    def head(self) -> Plain:
        """The chunk without its points."""
        return {k: v for k, v in asdict(self).items() if k != "points"}


def deal(plan: FleetPlan, with_points: bool = True) -> list[Chunk]:
    """All chunks of a plan, the same for the same plan; kinds of machines take turns.

    Their costs do not need their points, whose dealing takes a minute per 200,000.
    """
    dealt = [list(_chunks(plan, kind, with_points)) for kind in plan.machines]
    turns = (chunks[n] for n in range(max(map(len, dealt))) for chunks in dealt if n < len(chunks))
    return list(turns)


def _chunks(plan: FleetPlan, kind: Machines, with_points: bool) -> Iterator[Chunk]:
    """Chunks of one kind of machines: host times, op families, collectives, iterations."""
    swept = kind.swept
    together = tuple(n for n in swept if families()[n].ranks > 1)
    alone = tuple(n for n in swept if n not in together and kind.alone(n))
    ops = tuple(n for n in swept if n not in together and n not in alone)
    if kind.device == "cpu" and kind.nodes == 1:  # its collectives are ranks on its cores
        ops, together = ops + together, ()
    if kind.gpus_per_node * kind.nodes == 1:
        together = ()
    shares = {
        HOST: (alone, HOST_SHARE),
        OPS: (ops, 1 - HOST_SHARE - TOGETHER_SHARE),
        TOGETHER: (together, TOGETHER_SHARE),
    }
    shares = {what: (names, share) for what, (names, share) in shares.items() if names}
    whole = sum(share for _, share in shares.values())
    left_s = 60 * kind.minutes
    if kind.iterations:
        share_s = left_s * (ITERATIONS_SHARE if shares else 1.0)
        left_s -= share_s
        steps = [asdict(iteration_of(case(n))) for n in kind.iterations]
        yield _chunk(kind, ITERATIONS, ("iteration",), {"iteration": steps}, share_s, 0)
    for what, (names, share) in shares.items():
        total_s = left_s * share / whole
        count = 1 if what in (HOST, TOGETHER) else max(1, round(total_s / plan.chunk_s))
        wanted = with_points and what != TOGETHER
        points = _points(plan, kind, names, total_s) if wanted else {}
        for n in range(count):
            mine = {name: some[n::count] for name, some in points.items()}
            yield _chunk(kind, what, names, mine, total_s / count, n)


def _points(
    plan: FleetPlan, kind: Machines, names: Sequence[str], total_s: float
) -> dict[str, list[Plain]]:
    """Points of families for so many seconds, each point once, as the sweep orders them."""
    gpu = None if kind.device == "cpu" else load_gpu(kind.gpu)
    captured = captured_points(plan, kind.device)
    weights = {
        n: families()[n].weight if gpu is None else families()[n].gpu_sweep.weight for n in names
    }
    found: dict[str, list[Plain]] = {}
    for name, weight in weights.items():
        wanted = math.ceil(POINTS_PER_S * total_s * weight / sum(weights.values()))
        points: dict[Point, None] = {}
        for point in islice(space(name, captured, gpu, plan.seed), 2 * wanted):
            points[point] = None
            if len(points) == wanted:
                break
        found[name] = [asdict(p) for p in points]
    return found


def captured_points(plan: FleetPlan, device: str) -> Path:
    """The plan's file of captured points; without one models are captured here, once."""
    return plan.points or points_file(cache_folder("fleet"), device, plan.seed)


def _chunk(
    kind: Machines,
    what: str,
    names: tuple[str, ...],
    points: Mapping[str, Sequence[Plain]],
    seconds: float,
    number: int,
) -> Chunk:
    """A chunk, named by the hash of what is measured and with which software."""
    where = (kind.gpu, kind.cores, kind.python, kind.image, kind.gpus_per_node, kind.nodes)
    told = [what, where, kind.name if what == TOGETHER else "", names, points]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]
    return Chunk(
        machines=kind.name,
        kind=what,
        families=names,
        points=points,
        seconds=seconds,
        name=digest,
        number=number,
    )


def gpus_of(kind: Machines, chunk: Chunk) -> int:
    """Number of GPUs (or CPUs) that a chunk takes."""
    return kind.gpus_per_node * kind.nodes if chunk.kind == TOGETHER else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the chunks of one kind of machines cost: wall time, GPU hours, price if it is known."""

    machines: str
    gpu: str
    chunks: int
    wall_s: float
    gpu_hours: float
    price: float | None


def simulate(plan: FleetPlan, chunks: Sequence[Chunk]) -> list[Cost]:
    """Cost of each kind of machines: its chunks in order, each where a machine is free first."""
    found = []
    for kind in plan.machines:
        mine = [c for c in chunks if c.machines == kind.name]
        free_s = [0.0] * kind.count
        gpu_s = 0.0
        for chunk in mine:
            gpus = min(gpus_of(kind, chunk), kind.count)
            begin_s = max(heapq.heappop(free_s) for _ in range(gpus))
            end_s = min(begin_s + chunk.seconds + START_S, max(begin_s, plan.deadline_s))
            for _ in range(gpus):
                heapq.heappush(free_s, end_s)
            gpu_s += (end_s - begin_s) * gpus_of(kind, chunk)
        hours, price = gpu_s / 3600, plan.prices.get(kind.gpu)
        found.append(
            Cost(
                machines=kind.name,
                gpu=kind.gpu,
                chunks=len(mine),
                wall_s=max(free_s),
                gpu_hours=hours,
                price=None if price is None else price * hours,
            )
        )
    return found
