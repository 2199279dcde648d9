"""Deals the points of a fleet's plan into chunks, and simulates how long they take."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.cases.registry import case
from itercast.extras.fleet.plan import FleetPlan, Machines
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.ops import families
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import points_file
from itercast.microbench.sweep.orders import HOST_SHARE

ITERATIONS_SHARE = 0.35  # no assumption: of a machine's time, where it also sweeps ops
TOGETHER_SHARE = 0.1  # of the time, for collectives
START_S = 1.0  # of a chunk before and after its time, which includes the starts of its workers
OPS, HOST, TOGETHER, ITERATIONS = "ops", "host", "together", "iterations"
Plain = Row  # of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one task measures in ``seconds``: iterations, or a share of the points of families.

    ``points``: iterations, or captured points beside those of the sweep. On CPUs the chunks divide
    all points by their keys, see ``WorkerOrder``. On GPUs, whose points are drawn at random, each
    chunk draws its own, and has its part of the captured ones. ``name``: a hash of all this.
    """

    machines: str
    kind: str
    families: tuple[str, ...]
    points: Mapping[str, Sequence[Plain]]
    seconds: float
    name: str
    seed: int
    share: tuple[int, int]  # number, of how many


def deal(plan: FleetPlan, capture: bool = True) -> list[Chunk]:
    """All chunks of a plan, the same for the same plan; kinds of machines take turns.

    Their costs do not need captured points, which take a minute where the plan names no file.
    """
    by_kind = [list(_chunks(plan, kind, capture)) for kind in plan.machines]
    return [chunk for turn in zip_longest(*by_kind) for chunk in turn if chunk is not None]


def _chunks(plan: FleetPlan, kind: Machines, capture: bool) -> Iterator[Chunk]:
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
        yield _chunk(plan, kind, ITERATIONS, ("iteration",), {"iteration": steps}, share_s)
    captured = captured_points(plan, kind) if capture and shares else {}
    for what, (names, share) in shares.items():
        total_s = left_s * share / whole
        count = 1 if what in (HOST, TOGETHER) else max(1, round(total_s / plan.chunk_s))
        points = {name: captured[name] for name in names if name in captured}
        parts = 1 if kind.device == "cpu" else count  # chunks of CPUs share points by their keys
        for n in range(count):
            own = {name: listed[n % parts :: parts] for name, listed in points.items()}
            yield _chunk(plan, kind, what, names, own, total_s / count, (n, count))


def captured_points(plan: FleetPlan, kind: Machines) -> dict[str, list[Plain]]:
    """Captured points by family: the plan's, else of models that are captured here, once."""
    path = plan.points or points_file(cache_folder("fleet"), kind.device, plan.seed)
    plain = json.loads(path.read_text())
    return {name: plain[name] for name in families() if plain.get(name)}


def _chunk(
    plan: FleetPlan,
    kind: Machines,
    what: str,
    names: tuple[str, ...],
    points: Mapping[str, Sequence[Plain]],
    seconds: float,
    share: tuple[int, int] = (0, 1),
) -> Chunk:
    """A chunk, named by the hash of what is measured and with which software."""
    software = (kind.gpu, kind.cores, kind.python, kind.image, kind.gpus_per_node, kind.nodes)
    machines = kind.name if what == TOGETHER else ""
    measured = [what, software, machines, names, points, plan.seed, share]
    digest = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:20]
    on_cpu = kind.device == "cpu"
    return Chunk(
        machines=kind.name,
        kind=what,
        families=names,
        points=points,
        seconds=seconds,
        name=digest,
        seed=plan.seed if on_cpu else int(digest[:8], 16),
        share=share if on_cpu else (0, 1),
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
    costs = []
    for kind in plan.machines:
        own_chunks = [c for c in chunks if c.machines == kind.name]
        free_s = [0.0] * kind.count
        gpu_s = 0.0
        for chunk in own_chunks:
            gpus = min(gpus_of(kind, chunk), kind.count)
            begin_s = max(heapq.heappop(free_s) for _ in range(gpus))
            end_s = min(begin_s + chunk.seconds + START_S, max(begin_s, plan.deadline_s))
            for _ in range(gpus):
                heapq.heappush(free_s, end_s)
            gpu_s += (end_s - begin_s) * gpus_of(kind, chunk)
        hours, price = gpu_s / 3600, plan.prices.get(kind.gpu)
        costs.append(
            Cost(
                machines=kind.name,
                gpu=kind.gpu,
                chunks=len(own_chunks),
                wall_s=max(free_s),
                gpu_hours=hours,
                price=None if price is None else price * hours,
            )
        )
    return costs
