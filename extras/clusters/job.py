"""A training step on a cluster of unlike GPUs: its ranks, the links they cross, its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast, rank_of, report
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.parallel.placement import Crossing, cluster
from itercast.compose.plan_search.sizes import CapturesBySize
from itercast.compose.simulate.breakdown import Outcome
from itercast.compose.simulate.rank import Rank
from itercast.compose.target import Target
from itercast.extras.clusters.file import ClusterFile, GpuGroup

REDUCED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
NEIGHBOURS = ("shard", "intra_node", "inter_node")  # of gossip, a ring of all replicas
BOUNDARY = ("intra_node", "inter_node")  # axes of messages between stages


@dataclass(kw_only=True)
class Job:
    """A model on a cluster: samples of a step over all GPUs, and captures of its micro-batches."""

    cluster: ClusterFile
    captures: CapturesBySize
    samples: int
    seq: int
    optimizer: str
    dtype: str
    targets: dict[str, Target] = field(default_factory=dict)  # by name of the group

    @property
    def joined(self) -> bool:
        """Whether links join the groups: all but those of one CPU."""
        return all(target.gpu.kind != "cpu" for target in self.targets.values())

    def rank(self, group: GpuGroup, plan: ParallelPlan, rows: int, *crossings: Crossing) -> Rank:
        """A rank on one of the group's GPUs, with all layers and a micro-batch of ``rows``."""
        target = self.targets[group.name]
        where = replace(cluster(plan, target.gpu, target.node), crossings=crossings)
        return rank_of(self.captures.at((rows, self.seq, plan.autocast)), plan, target.book, where)


def crossings(
    job: Job,
    pairs: Sequence[tuple[GpuGroup, GpuGroup]],
    kinds: Sequence[str],
    axes: Sequence[str],
    sharers: int,
) -> list[Crossing]:
    """The slowest of the links between pairs of groups; none within a group or a CPU."""
    links = [job.cluster.link(a, b) for a, b in pairs if a != b and job.joined]
    if not links:
        return []
    rate = min(link.bytes_per_s for link in links)
    late_us = max(link.latency_us for link in links)
    return [
        Crossing(
            kinds=tuple(kinds),
            axes=tuple(axes),
            bytes_per_s=rate,
            latency_us=late_us,
            sharers=sharers,
        )
    ]


def replicas(job: Job, plan: ParallelPlan, split: Sequence[int]) -> list[Rank]:
    """A rank of each group, with a micro-batch of so many samples."""
    groups = job.cluster.groups
    ring = [(g, groups[(i + 1) % len(groups)]) for i, g in enumerate(groups)]
    crossed = crossings(job, ring, REDUCED, ("shard",), plan.tp)
    crossed += crossings(job, ring, ("send_recv",), NEIGHBOURS, plan.tp) if plan.gossip else []
    pairs = zip(groups, split, strict=True)
    return [replace(job.rank(g, plan, n, *crossed), kin=g.count) for g, n in pairs]


def stages(job: Job, plan: ParallelPlan, groups: Sequence[GpuGroup], rows: int) -> list[Rank]:
    """A rank of each stage, by its group; stages of one group with equal links are the same one."""
    made: dict[tuple[str, str], Rank] = {}
    found, ends, each = [], (groups[0], groups[-1]), plan.world_size // plan.pp
    for i, group in enumerate(groups):
        after = groups[(i + 1) % len(groups)]
        if (group.name, after.name) not in made:
            sends = [(group, after)] if i + 1 < len(groups) or plan.virtual > 1 else []
            tied = [ends] if group in ends else []
            crossed = crossings(job, sends, ("send_recv",), BOUNDARY, each)
            crossed += crossings(job, tied, ("all_reduce",), BOUNDARY, each)
            made[group.name, after.name] = job.rank(group, plan, rows, *crossed)
        found.append(made[group.name, after.name])
    return found


def report_job(
    job: Job,
    plan: ParallelPlan,
    found: Outcome,
    groups: Sequence[GpuGroup],
    shares: Sequence[Mapping[str, Any]],
    even_us: float,
) -> Forecast:
    """The forecast: ``groups`` by number of the rank in ``found``, ``shares`` by group."""
    slowest, fullest = (job.targets[groups[i].name] for i in (found.slowest, found.fullest))
    told = report(
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
    pairs = zip(job.cluster.groups, shares, strict=True)
    parts = [{"group": g.name, "gpu": g.gpu, "gpus": g.count, **own} for g, own in pairs]
    every = [(g.count, job.targets[g.name].gpu) for g in job.cluster.groups]
    power_w = sum(n * gpu.power_w for n, gpu in every)
    return replace(
        told,
        gpu=" + ".join(f"{n} x {gpu.name}" for n, gpu in every),
        energy_j=power_w * found.iteration_us * 1e-6,
        cluster={"groups": parts, "even_us": even_us},
    )
