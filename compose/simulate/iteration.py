"""Simulates an iteration under a plan: its time, its memory, and what each is spent on.

Ranks that do the same are simulated once. What the others do are several lists of runs: one of each
stage of a pipeline (``stage_rank``), or one of each kind of replica (``replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.simulate.breakdown import Outcome, on_slowest
from itercast.compose.simulate.fsdp import shard_bytes
from itercast.compose.simulate.memory_plan import (
    held_by_software,
    in_flight_sizes,
    stage_memory,
)
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.replicas import Replicas, replicas_of
from itercast.compose.simulate.stage_rank import Pipeline, by_rank, pipeline_of
from itercast.microbench.hardware.stack import stack_of_row


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """Simulate the iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    return evaluate_ranks([rank] * rank.plan.pp, optimizer)


def quick_us(rank: Rank, optimizer: str) -> float:
    """Time of the iteration as ``evaluate`` simulates it, without its breakdown."""
    return max(_simulated([rank] * rank.plan.pp, optimizer).totals_us())


def evaluate_ranks(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Outcome:
    """The iteration of ranks of unlike work or devices, broken down on the slowest of them.

    ``ranks``: of each stage one with all layers, priced on the stage's device; without a pipeline
    one of each kind of replica, with its own micro-batch. ``crowding``: see ``side_by_side``.
    """
    step = _simulated(ranks, optimizer, crowding)
    memories = by_rank(ranks, lambda rank: stage_memory(rank, optimizer))
    offloaded = max(host_memory(rank, optimizer) for rank in ranks)
    return replace(on_slowest(step, ranks, memories), host_memory_bytes=offloaded)


def host_memory(rank: Rank, optimizer: str) -> int:
    """Bytes that the fullest rank of a plan has in host memory because it offloads them.

    Where parameters lie there, shards of these, of gradients and of the optimizer's states;
    activations of all micro-batches in flight. What is on its way is on the GPU too.
    """
    plan, states, found = rank.plan, STATE_COPIES[optimizer], [0]
    for sizes, others in in_flight_sizes(rank) if plan.offload else ():
        held = held_by_software(sizes, plan, stack_of_row(rank.book.stack).held)[1]
        bytes_of = {
            "activations": others + sum(x.saved_bytes * n for x, n in sizes.runs),
            "optimizer": sizes.held_by_rank(plan, optimizer, held)[1],
            "parameters": 0,
        }
        for x, n in sizes.runs:
            shard, gradients = shard_bytes(x.layer, plan.shards, fp32=plan.amp)
            bytes_of["parameters"] += n * (shard + (1 + states) * gradients)
        found.append(round(sum(bytes_of[name] for name in plan.offload.split("+"))))
    return max(found)


def _simulated(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Pipeline | Replicas:
    if ranks[0].plan.pp > 1:
        return pipeline_of(ranks, optimizer)
    return replicas_of(ranks, optimizer, crowding)
