"""Simulates an iteration under a plan: its time, its memory, and what each is spent on.

Ranks that do the same are simulated once. What the others do are several lists of runs: one of each
stage of a pipeline (``stage_rank``), or one of each kind of replica (``replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence

from itercast.compose.simulate.breakdown import Outcome, on_slowest
from itercast.compose.simulate.memory_plan import stage_memory
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
    """The iteration of ranks of unlike work or devices, broken down on the slowest of them.

    ``ranks``: of each stage one with all layers, priced on the stage's device; without a pipeline
    one of each kind of replica, with its own micro-batch. ``crowding``: see ``side_by_side``.
    """
    step = _simulated(ranks, optimizer, crowding)
    memories = by_rank(ranks, lambda rank: stage_memory(rank, optimizer))
    return on_slowest(step, ranks, memories)


def _simulated(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Pipeline | Replicas:
    if ranks[0].plan.pp > 1:
        return pipeline_of(ranks, optimizer)
    return replicas_of(ranks, optimizer, crowding)
