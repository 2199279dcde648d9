"""Simulates an iteration under a plan: its time, its memory, and what each is spent on.

Ranks that do the same are simulated once. Ranks that differ have a list of runs each: per stage of
a pipeline (``stage_rank``), or per kind of replica (``replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.simulate.breakdown import Outcome, Shares, Tally, broken_down
from itercast.compose.simulate.memory.stage_memory import host_memory, stage_memory
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.replicas import Replicas, replicas_of
from itercast.compose.simulate.stage_rank import Pipeline, by_rank, pipeline_of


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """Simulate the iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    return evaluate_ranks([rank] * rank.plan.pp, optimizer)


def quick_us(rank: Rank, optimizer: str) -> float:
    """Time of the iteration as ``evaluate`` simulates it, without its breakdown."""
    return max(_simulated([rank] * rank.plan.pp, optimizer).totals_us())


def evaluate_ranks(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Outcome:
    """Simulate an iteration of ranks with unlike work or devices; its breakdown is the slowest's.

    ``ranks``: in a pipeline, for each stage a rank that holds all layers, priced on the stage's
    device; else one rank for each kind of replica, with its own micro-batch. ``crowding``: see
    ``timeline.side_by_side``.
    """
    step = _simulated(ranks, optimizer, crowding)
    memories = by_rank(ranks, lambda rank: stage_memory(rank, optimizer))
    offloaded = max(host_memory(rank, optimizer) for rank in ranks)
    return replace(_on_slowest(step, ranks, memories), host_memory_bytes=offloaded)


def _on_slowest(
    step: Pipeline | Replicas, ranks: Sequence[Rank], memories: Sequence[dict[str, int]]
) -> Outcome:
    """Break a simulated step down on its slowest rank; its memory is that of the fullest rank.

    ``ranks``: of ``step``, with all layers; ``memories``: bytes of each rank, by purpose.
    """
    plan, totals, loads = ranks[0].plan, step.totals_us(), step.loads_us()
    micro = plan.microbatches
    slowest = max(range(len(ranks)), key=lambda r: (loads[r], totals[r]))
    lanes, runs = step.lanes_of(slowest), step.runs_of(slowest)
    sends_us, bubble_us = step.schedule_us(slowest)
    exposed_us = min(lanes.exposed_us + sends_us, max(0.0, max(totals) - lanes.compute_us))
    free_bytes = [
        room_bytes(rank.book.gpu, rank.plan) - sum(memory.values())
        for rank, memory in zip(ranks, memories, strict=True)
    ]
    fullest = free_bytes.index(min(free_bytes))
    tally = Tally(ranks[slowest].book.gpu.kind == "cpu")
    _tally_layers(tally, step.stages[slowest].layers, micro, _accumulations(ranks[slowest]))
    for run, n in runs:
        tally.count(run.added, n)
    for op, times in step.others_of(slowest):
        tally.count([op], times)
    comm_us = exposed_us + max(0.0, lanes.comm_us - lanes.exposed_us) + tally.hidden_us
    return broken_down(
        Shares(max(totals), lanes.compute_us, exposed_us, comm_us),
        tally,
        runs[-1][0],
        memory=memories[fullest],
        matmul_s=micro * _mean_matmul_s(step.stages) * plan.participants / plan.dp,
        host_gap_us=step.host_gap_us(slowest, lanes.idle_us),
        bubble_us=bubble_us,
        slowest=slowest,
        fullest=fullest,
    )


def _mean_matmul_s(ranks: Sequence[Rank]) -> float:
    """Matrix products of a micro-batch at peak, in seconds: the mean over all ranks of the job."""
    counts = [rank.kin or 1 for rank in ranks]
    sums_s = (sum(x.matmul_s for x in rank.layers) for rank in ranks)
    return sum(n * sum_s for n, sum_s in zip(counts, sums_s, strict=True)) / sum(counts)


def _accumulations(rank: Rank) -> int:
    """Counts how often layers add their gradients to those of earlier micro-batches.

    0 where gradient shards are added instead, and where gradients are copied into buckets.
    """
    if rank.strategy.scatters_each:
        return 0
    strategy, zeroed = rank.strategy, rank.one_by_one
    in_bucket = bool(strategy.reduce) and not strategy.gossip
    return max(0, rank.plan.microbatches - (not zeroed) - in_bucket)


def _tally_layers(
    tally: Tally, layers: Sequence[PricedLayer], micro: int, accumulations: int
) -> None:
    """Add the ops of ``micro`` micro-batches, and ``accumulations`` sums of gradients."""
    counted: dict[int, tuple[PricedLayer, int]] = {}
    for x in layers:
        counted[id(x)] = (x, counted.get(id(x), (x, 0))[1] + 1)
    for x, n in counted.values():
        tally.count([*x.forward, *x.backward], n * micro)
        tally.count(x.trained_only(x.accumulate), n * accumulations)


def _simulated(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Pipeline | Replicas:
    """The step of ranks with its times; arguments as of ``evaluate_ranks``."""
    if ranks[0].plan.pp > 1:
        return pipeline_of(ranks, optimizer)
    return replicas_of(ranks, optimizer, crowding)
