"""A training step on a cluster of unlike GPUs: its ranks, the links they cross, its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from typing import Any

from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast, rank_of, report
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.parallel.placement import Crossing, cluster_for
from itercast.compose.plan_search.sizes import CapturesBySize
from itercast.compose.simulate.breakdown import Outcome
from itercast.compose.simulate.rank import Rank
from itercast.compose.target import Target
from itercast.extras.clusters.file import ClusterFile, GpuGroup
from itercast.microbench.ops.step.alpha_beta import EXCHANGE

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
        place = replace(cluster_for(plan, target.gpu, target.node), crossings=crossings)
        return rank_of(self.captures.at((rows, self.seq, plan.autocast)), plan, target.book, place)


def crossings(
    job: Job,
    pairs: Sequence[tuple[GpuGroup, GpuGroup]],
    kinds: Sequence[str],
    axes: Sequence[str],
    sharers: int,
) -> list[Crossing]:
    """The link that messages of these kinds and axes cross between groups: the slowest of a pair.

    Equal pairs share their link. Empty if no pair is of two groups, or all are on one CPU.
    """
    shared = Counter((a, b) for a, b in pairs if a != b and job.joined)
    links = [(job.cluster.link(a, b), n) for (a, b), n in shared.items()]
    if not links:
        return []
    rate = min(link.bytes_per_s / n for link, n in links)
    latency_us = max(link.latency_us for link, _ in links)
    return [
        Crossing(
            kinds=tuple(kinds),
            axes=tuple(axes),
            bytes_per_s=rate,
            latency_us=latency_us,
            sharers=sharers,
        )
    ]


def replicas(
    job: Job, plan: ParallelPlan, split: Sequence[int], taking_part: Sequence[int], away: int = 1
) -> list[Rank]:
    """One rank per group that takes part; ``taking_part``: the groups' numbers in the cluster.

    ``split``: samples of a micro-batch, by group. ``away``: under gossip, the distance in the ring
    to the neighbour that a replica, or a node of replicas, sends to.
    """
    groups, share = [job.cluster.groups[i] for i in taking_part], plan.participants / plan.dp
    ring, peers, ranks = _pairs(groups, 1), _peers(job, plan), list[Rank]()
    for i, group in zip(taking_part, groups, strict=True):
        slow_links = crossings(job, ring, REDUCED, ("shard",), plan.tp)
        if plan.gossip:
            sharers = group.count // peers.count(group)
            slow_links += crossings(job, _pairs(peers, away), (EXCHANGE,), NEIGHBOURS, sharers)
        rank = job.rank(group, plan, split[i], *slow_links)
        ranks.append(replace(rank, kin=share * group.count))
    return ranks


def _pairs(places: Sequence[GpuGroup], away: int) -> list[tuple[GpuGroup, GpuGroup]]:
    """Each of the places in a ring, with the one to which it sends."""
    return [(g, places[(i + away) % len(places)]) for i, g in enumerate(places)]


def _peers(job: Job, plan: ParallelPlan) -> list[GpuGroup]:
    """The group of each peer that gossips: a replica, or a node whose replicas average first."""
    peers = list[GpuGroup]()
    for group in job.cluster.groups:
        target = job.targets[group.name]
        shard = cluster_for(plan, target.gpu, target.node).groups["shard"]
        averaged_first = shard.per_node if shard.per_node < shard.size else 1
        peers += [group] * max(1, group.count // plan.tp // averaged_first)
    return peers


def rounds(job: Job, plan: ParallelPlan) -> list[tuple[float, tuple[int, ...], int]]:
    """Kinds of steps that take turns: (share of steps, groups that take part, ``away``).

    With exp2 gossip neighbours are 1, 2, 4... away in turn. With sampled participants, k of n
    replicas, a set of groups has as share the probability that exactly these groups have
    participants: the choices of k among their m replicas, C(m, k), minus those within smaller sets,
    over C(n, k).
    """
    numbers = range(len(job.cluster.groups))
    if plan.gossip == "exp2":
        away = [2**i for i in range((len(_peers(job, plan)) - 1).bit_length())]
        return [(1 / len(away), tuple(numbers), d) for d in away]
    counts = [group.count // plan.tp for group in job.cluster.groups]  # of replicas
    ways = dict[tuple[int, ...], int]()  # to choose participants, by the groups that have some
    for chosen in (c for n in numbers for c in combinations(numbers, n + 1)):
        fewer = sum(n for subset, n in ways.items() if set(subset) < set(chosen))
        ways[chosen] = comb(sum(counts[i] for i in chosen), plan.participants) - fewer
    total = sum(ways.values())
    return [(n / total, chosen, 1) for chosen, n in ways.items() if n]


def stages(job: Job, plan: ParallelPlan, groups: Sequence[GpuGroup], rows: int) -> list[Rank]:
    """One rank per pipeline stage; ``groups``: the group of each stage.

    Stages of one group with equal links share one object, which is simulated once.
    """
    rank_of_pair: dict[tuple[str, str], Rank] = {}
    ranks, ends, ranks_per_stage = [], (groups[0], groups[-1]), plan.world_size // plan.pp
    for i, group in enumerate(groups):
        after = groups[(i + 1) % len(groups)]
        if (group.name, after.name) not in rank_of_pair:
            sends = [(group, after)] if i + 1 < len(groups) or plan.virtual > 1 else []
            tied = [ends] if group in ends else []  # gradients of tied embeddings
            slow_links = crossings(job, sends, ("send_recv",), BOUNDARY, ranks_per_stage)
            slow_links += crossings(job, tied, ("all_reduce",), BOUNDARY, ranks_per_stage)
            rank_of_pair[group.name, after.name] = job.rank(group, plan, rows, *slow_links)
        ranks.append(rank_of_pair[group.name, after.name])
    return ranks


def report_job(
    job: Job,
    plan: ParallelPlan,
    outcome: Outcome,
    groups: Sequence[GpuGroup],
    shares: Sequence[Mapping[str, Any]],
    even_us: float,
) -> Forecast:
    """The forecast of a simulated step.

    ``groups``: that of each simulated rank. ``shares``: rows or layers, by group of the cluster.
    ``even_us``: the step's time if all GPUs had equal shares, 0 where they can't.
    """
    samples = job.samples * plan.participants / plan.dp  # of those that take part, on average
    slowest, fullest = (job.targets[groups[i].name] for i in (outcome.slowest, outcome.fullest))
    forecast = report(
        outcome,
        slowest.book,
        plan=str(plan),
        bundle_name=slowest.bundle_name,
        network="",
        room=room_bytes(fullest.gpu, plan),
        world_size=plan.world_size,
        samples=samples,
        tokens=samples * job.seq,
    )
    pairs = zip(job.cluster.groups, shares, strict=True)
    parts = [{"group": g.name, "gpu": g.gpu, "gpus": g.count, **share} for g, share in pairs]
    gpus = [(g.count, job.targets[g.name].gpu) for g in job.cluster.groups]
    power_w = sum(n * gpu.power_w for n, gpu in gpus)
    return replace(
        forecast,
        gpu=" + ".join(f"{n} x {gpu.name}" for n, gpu in gpus),
        energy_j=power_w * outcome.iteration_us * 1e-6,
        cluster={"groups": parts, "even_us": even_us},
    )
