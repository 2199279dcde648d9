"""Forecasts a training step on unlike GPUs, with its batch or its layers split as balances best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from math import ceil, lcm
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from itercast.compose.clusters.file import ClusterFile, GpuGroup
from itercast.compose.forecast import Forecast, rank_of, report_step
from itercast.compose.graph.sizes import CapturesBySize
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.pricing.collectives import Crossing, cluster
from itercast.compose.pricing.layer_prices import price_model
from itercast.compose.simulate.iteration import Outcome, evaluate_stages, quick_us
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import balanced
from itercast.compose.simulate.unlike import evaluate_replicas
from itercast.compose.target import Target, find_target
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import V_SHAPED, ParallelPlan, micro_batch

# Keys of plans that need equal replicas, or groups of ranks across them.
EQUAL = ("cp", "ep", "hsdp", "cdp", "gossip", "local", "shard", "node", "nodes")
REDUCED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
T = TypeVar("T")


@dataclass(kw_only=True)
class Job:
    """A model on a cluster: samples of a step over all GPUs, and captures of its micro-batches."""

    cluster: ClusterFile
    captures: CapturesBySize
    samples: int
    seq: int
    optimizer: str
    targets: dict[str, Target] = field(default_factory=dict)  # by name of the group

    def rank(self, group: GpuGroup, plan: ParallelPlan, rows: int, *crossings: Crossing) -> Rank:
        """A rank on one of the group's GPUs, with all layers and a micro-batch of ``rows``."""
        target = self.targets[group.name]
        where = replace(cluster(plan, target.gpu, target.node), crossings=crossings)
        model = price_model(self.captures.at((rows, self.seq)), plan, target.book, where)
        return rank_of(plan, model, target.book, where)


def open_job(
    file: ClusterFile,
    capture_at: Callable[[int, int], StepCapture],
    *,
    samples: int,
    seq: int,
    optimizer: str,
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
) -> Job:
    """The job with the prices of each group; ValueError where its GPUs are unknown."""
    targets = {}
    for group in file.groups:
        try:
            node = ParallelPlan(dp=file.gpus, node=group.node)
            found = find_target(group.gpu, node, bundle, host, stack)
        except ValueError as exc:
            raise ValueError(f"{file.path}: group {group.name!r}: {exc}") from None
        targets[group.name] = replace(found, threads=group.threads or found.threads)
    if len({target.gpu.kind for target in targets.values()}) > 1:
        raise ValueError(f"{file.path}: GPUs and CPUs do not train one model together here")
    captures = CapturesBySize(capture_at)
    return Job(
        cluster=file,
        captures=captures,
        samples=samples,
        seq=seq,
        optimizer=optimizer,
        targets=targets,
    )


def forecast_job(job: Job, plan: ParallelPlan) -> Forecast:
    """Forecast a step with the split of its batch (pp=1) or of its layers that is fastest."""
    file = job.cluster
    text, unequal = f"plan {str(plan)!r}", [key for key in EQUAL if key in plan.stated]
    if unequal or plan.schedule in V_SHAPED:
        wrong = ", ".join(unequal) or plan.schedule
        raise ValueError(f"{text}: {wrong} needs equal GPUs; a cluster takes dp, tp and pp")
    if plan.world_size != file.gpus:
        raise ValueError(f"{text} has {plan.world_size} ranks, {file.path} {file.gpus} GPUs")
    each = plan.tp if plan.pp == 1 else plan.tp * plan.dp
    for group in file.groups:
        if group.count % each:
            what = "replica" if plan.pp == 1 else "stage"
            rule = f"a {what} has {each} GPUs of one kind"
            raise ValueError(f"{text}: {rule}; group {group.name!r} has {group.count}")
    if plan.pp == 1:
        return _split_batch(job, plan)
    return _split_layers(job, plan)


def _split_batch(job: Job, plan: ParallelPlan) -> Forecast:
    """Search samples of a micro-batch by group: from balanced ones on, one step at a time."""
    groups, micro = job.cluster.groups, plan.microbatches
    replicas = [group.count // plan.tp for group in groups]
    rows, rest = divmod(job.samples, micro)
    stated = [group.rows for group in groups]
    if rest:
        raise ValueError(f"plan {str(plan)!r}: {job.samples} samples in {micro} micro-batches")
    even = [rows // plan.dp] * len(groups) if rows % plan.dp == 0 else []
    even = [] if any(s and [s] != even[:1] for s in stated) else even
    sizes = sorted({1, rows, *(2**n for n in range(rows.bit_length())), *even[:1], *stated} - {0})
    most = [rows - sum(replicas) + n for n in replicas]
    job.captures.announce((n, job.seq) for n in range(1, max(most) + 1))
    limits = [max(1, left // n) for left, n in zip(most, replicas, strict=True)]
    curves = []
    for group, limit in zip(groups, limits, strict=True):
        known = sorted({min(size, limit) for size in sizes})
        us = [quick_us(job.rank(group, plan, n), job.optimizer) for n in known]
        curves.append(np.interp(np.arange(limit + 1), known, us))
    start = _least_maximum(curves, replicas, rows, stated)
    if start is None:
        pairs = zip(stated, replicas, strict=True)
        counts = " + ".join(f"{n} x {one or 'rows'}" for one, n in pairs)
        raise ValueError(f"{job.cluster.path}: {counts} make no micro-batches of {rows} samples")
    tried: dict[tuple[int, ...], Outcome] = {}

    def simulated(split: tuple[int, ...]) -> float:
        if split not in tried:
            tried[split] = _replicas(job, plan, split)
        return tried[split].iteration_us

    def others(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for a, b in permutations(range(len(split)), 2):
            step = lcm(replicas[a], replicas[b])
            moved = list(split)
            moved[a] -= step // replicas[a]
            moved[b] += step // replicas[b]
            if moved[a] > 0 and not stated[a] and not stated[b]:
                yield tuple(moved)

    best = _descend(start, others, simulated)
    even_us = simulated(tuple(even)) if even else 0.0
    parts = [
        {"group": g.name, "gpu": g.gpu, "gpus": g.count, "rows": n}
        for g, n in zip(groups, best, strict=True)
    ]
    return _report(job, plan, tried[best], groups, parts, even_us)


def _least_maximum(
    curves: Sequence[np.ndarray], replicas: Sequence[int], rows: int, stated: Sequence[int]
) -> tuple[int, ...] | None:
    """Rows of each replica by group that sum up to ``rows``, with which the slowest is fastest.

    ``curves``: by group the time of 0, 1, 2... rows. Exact, group by group. None: no such rows.
    """
    best = np.full(rows + 1, np.inf)  # the slowest so far, by rows that are dealt
    best[0] = 0.0
    chosen = []
    for curve, n, fixed in zip(curves, replicas, stated, strict=True):
        after, took = np.full(rows + 1, np.inf), np.zeros(rows + 1, dtype=int)
        for b in [fixed] if fixed else range(1, len(curve)):
            if b < len(curve) and b * n <= rows:
                us = np.maximum(best[: rows + 1 - b * n], curve[b])
                better = us < after[b * n :]
                after[b * n :][better], took[b * n :][better] = us[better], b
        best = after
        chosen.append(took)
    if not np.isfinite(best[rows]):
        return None
    found = list[int]()
    for took, n in zip(reversed(chosen), reversed(replicas), strict=True):
        found.append(int(took[rows]))
        rows -= n * found[-1]
    return tuple(reversed(found))


def _descend(start: T, others: Callable[[T], Iterator[T]], cost: Callable[[T], float]) -> T:
    """From ``start`` on to the best neighbour, as long as one is better."""
    while True:
        best = min(others(start), key=cost, default=start)
        if cost(best) >= cost(start):
            return start
        start = best


def _replicas(job: Job, plan: ParallelPlan, split: Sequence[int]) -> Outcome:
    groups = job.cluster.groups
    ring = list(pairwise(groups)) + ([(groups[-1], groups[0])] if len(groups) > 2 else [])
    crossings = []
    if _joined(job) and ring:
        links = [job.cluster.link(a, b) for a, b in ring]
        slowest = Crossing(
            kinds=REDUCED,
            axes=("shard",),
            bytes_per_s=min(link.bytes_per_s for link in links),
            latency_us=max(link.latency_us for link in links),
            sharers=plan.tp,
        )
        crossings.append(slowest)
    ranks = [
        replace(job.rank(g, plan, n, *crossings), kin=g.count)
        for g, n in zip(groups, split, strict=True)
    ]
    if _joined(job):
        return evaluate_replicas(ranks, job.optimizer)
    cores = ranks[0].book.gpu.sm_count
    asked = [g.count * r.book.threads / cores for g, r in zip(groups, ranks, strict=True)]
    # a loop over threads ends with its slowest one: that on the core that has most threads
    crowding = max(1.0, ceil(sum(asked)) / max(1.0, *asked))
    return evaluate_replicas(ranks, job.optimizer, crowding)


def _joined(job: Job) -> bool:
    """Whether groups are joined by links: all but ranks of one CPU."""
    return next(iter(job.targets.values())).gpu.kind != "cpu"


def _split_layers(job: Job, plan: ParallelPlan) -> Forecast:
    """Search layers by stage: from balanced ones on, a layer moves between neighbours."""
    each = plan.world_size // plan.pp
    groups = [g for g in job.cluster.groups for _ in range(g.count // each)]
    rows, _ = micro_batch(plan, _share(job, plan), job.seq)
    tried: dict[ParallelPlan, Outcome] = {}

    def simulated(split: ParallelPlan) -> float:
        if split not in tried:
            tried[split] = evaluate_stages(_stages(job, split, groups, rows), job.optimizer)
        return tried[split].iteration_us

    def others(split: ParallelPlan) -> Iterator[ParallelPlan]:
        sizes = [int(n) for n in split.layers.split("+")]
        for a, b in pairwise(range(len(sizes))):
            for step in (-1, 1):
                moved = [*sizes]
                moved[a], moved[b] = sizes[a] + step, sizes[b] - step
                if min(moved) > 0:
                    yield replace(split, layers="+".join(map(str, moved)))

    best = plan
    if not (plan.layers or plan.first or plan.last):
        stages = _stages(job, plan, groups, rows)
        pieces = [stages[c % plan.pp].model.layers for c in range(plan.pp * plan.virtual)]
        best = _descend(balanced(pieces, plan), others, simulated)
    even_us = simulated(replace(plan, layers="", first=0, last=0))
    simulated(best)
    sizes = best.layers.split("+") if best.layers else []
    parts = []
    for group in job.cluster.groups:
        own = [n for i, n in enumerate(sizes) if groups[i % plan.pp] == group]
        part = {"group": group.name, "gpu": group.gpu, "gpus": group.count}
        parts.append({**part, "layers": "+".join(own)})
    return _report(job, best, tried[best], groups, parts, even_us)


def _share(job: Job, plan: ParallelPlan) -> int:
    if job.samples % plan.dp:
        raise ValueError(f"plan {str(plan)!r}: dp does not divide {job.samples} samples")
    return job.samples // plan.dp


def _stages(job: Job, plan: ParallelPlan, groups: Sequence[GpuGroup], rows: int) -> list[Rank]:
    """A rank of each stage; stages of one group with equal links are the same one."""
    made: dict[tuple[str, str], Rank] = {}
    found, first, last = [], groups[0], groups[-1]
    for i, group in enumerate(groups):
        after = groups[(i + 1) % len(groups)]
        sends = i + 1 < len(groups) or plan.virtual > 1
        crossed = _crossings(job, group, after, "send_recv", plan) if sends else []
        for end in {first, last} if group in (first, last) else ():  # of tied weights
            crossed += _crossings(job, group, end, "all_reduce", plan)
        key = (group.name, after.name)
        made.setdefault(key, job.rank(group, plan, rows, *crossed))
        found.append(made[key])
    return found


def _crossings(job: Job, a: GpuGroup, b: GpuGroup, kind: str, plan: ParallelPlan) -> list[Crossing]:
    """The link that messages between stages on two groups cross; none within a group."""
    if a == b or not _joined(job):
        return []
    link, ends = job.cluster.link(a, b), ("intra_node", "inter_node")
    return [
        Crossing(
            kinds=(kind,),
            axes=ends,
            bytes_per_s=link.bytes_per_s,
            latency_us=link.latency_us,
            sharers=plan.world_size // plan.pp,
        )
    ]


def _report(
    job: Job,
    plan: ParallelPlan,
    found: Outcome,
    groups: Sequence[GpuGroup],
    parts: Sequence[Mapping[str, Any]],
    even_us: float,
) -> Forecast:
    """The forecast; ``groups`` by number of the rank in ``found``, ``parts`` as in ``Forecast``."""
    slowest, fullest = (job.targets[groups[i].name] for i in (found.slowest, found.fullest))
    told = report_step(
        found,
        slowest.book,
        plan=str(plan),
        bundle_name=slowest.bundle_name,
        network="",
        room=room_bytes(fullest.gpu, plan),
        world_size=plan.world_size,
        samples=job.samples,
        tokens=job.samples * job.seq,
    )
    every = [(g.count, job.targets[g.name].gpu) for g in job.cluster.groups]
    power_w = sum(n * gpu.power_w for n, gpu in every)
    return replace(
        told,
        gpu=" + ".join(f"{n} x {gpu.name}" for n, gpu in every),
        energy_j=power_w * found.iteration_us * 1e-6,
        cluster={"groups": list(parts), "even_us": even_us},
    )
