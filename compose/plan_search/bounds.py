"""Lower bounds of a plan's time, from its ranks' compute and the FSDP messages beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from itercast.compose.machines.contention import TAKING_TURNS
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.simulate.fsdp import Unit
from itercast.compose.simulate.memory.rank_memory import LayerRun
from itercast.compose.simulate.pipeline import CUT_BACKWARD
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stage_rank import stage_facts
from itercast.compose.simulate.stages import chunks_of, dealt

Sent = tuple[PricedOp, float]  # a message, and how often


def mean_us(rank: Rank) -> float:
    """The mean over stages of the compute of all micro-batches, however layers are dealt."""
    plan = rank.plan
    return plan.microbatches * compute_us([(x, x.layer.count) for x in rank.model.layers]) / plan.pp


def compute_us(runs: Sequence[LayerRun]) -> float:
    """A micro-batch's compute on these layers."""
    return sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in runs)


def least_us(rank: Rank) -> float:
    """A lower bound of the iteration: work that any schedule must do one after the other.

    It is the first micro-batch's forward on the stages before a rank, all of that rank's work, and
    the last one's backward on its way back, without the weight gradients that may fill the bubble.
    """
    plan = rank.plan
    facts = (plan.microbatches, stage_facts(rank)) if _gathers_in_each(rank) else ()
    key = ("loads", *plan.parts("stages"), plan.schedule, facts)
    loads_us, waits_us = rank.model.once(key, partial(_stage_times_us, rank))
    bound_us, earlier_stages_us = 0.0, 0.0
    for load_us, wait_us in zip(loads_us, waits_us, strict=True):
        bound_us = max(bound_us, earlier_stages_us + plan.microbatches * load_us)
        earlier_stages_us += wait_us
    return float(bound_us)


def _gathers_in_each(rank: Rank) -> bool:
    """Whether FSDP gathers parameters in each micro-batch."""
    return rank.strategy.by_layer and rank.strategy.every_micro


def _stage_times_us(rank: Rank) -> tuple[list[float], list[float]]:
    """Times in us of a micro-batch on each stage: of all its work, and until the next can begin.

    The next stage waits for the stage's first chunk, but not for its weight gradients where the
    schedule does them later.
    """
    chunks, cut = chunks_of(rank), rank.plan.schedule in CUT_BACKWARD
    times_us = dict[object, tuple[float, float]]()  # by chunk: its load, what others wait for
    for chunk in {chunk.key: chunk for chunk in chunks}.values():
        weight_us = sum(count * layer.weight_us for layer, count in chunk.runs) if cut else 0.0
        waited_us = compute_us(chunk.runs) - weight_us
        if _gathers_in_each(rank):  # for the first forward, beside which no backward runs
            forward_us = sum(n * layer.forward_work.lane_us for layer, n in chunk.runs)
            messages = _fsdp_messages(rank, chunk.runs, 1, 0)
            waited_us += _beside_us(rank, forward_us, messages) - forward_us
        times_us[chunk.key] = (_micro_us(rank, chunk.runs), waited_us)
    of_chunks = [times_us[chunk.key] for chunk in chunks]
    loads = [sum(load_us for load_us, _ in own) for own in dealt(rank.plan, of_chunks)]
    return loads, [waited_us for _, waited_us in of_chunks[: rank.plan.pp]]


def _micro_us(rank: Rank, runs: Sequence[LayerRun]) -> float:
    """The least time of a micro-batch on these layers: compute and FSDP's messages beside it.

    In a pipeline layers are gathered in each micro-batch, and once more in each step.
    """
    own_us, strategy = compute_us(runs), rank.strategy
    if not _gathers_in_each(rank):
        return own_us
    often = 1 + strategy.regather / (rank.plan.microbatches if strategy.whole_after_backward else 1)
    return _beside_us(rank, own_us, _fsdp_messages(rank, runs, often, int(strategy.scatters_each)))


def _fsdp_messages(
    rank: Rank, runs: Sequence[LayerRun], gathers: float, scatters: int
) -> list[Sent]:
    """Messages of FSDP for these layers, with counts; a pipeline gathers the root once a step."""
    whole_rank, messages = replace(rank, layers=tuple(layer for layer, _ in runs)), list[Sent]()
    root = tuple(layer for layer, count in runs for _ in range(count) if not layer.numbered)
    units = [((layer,), count, gathers) for layer, count in runs if layer.numbered]
    once = 1 / rank.plan.microbatches if rank.strategy.whole_after_backward and gathers > 1 else 1.0
    for layers, count, often in [(root, 1, once), *units]:
        unit = Unit(rank=whole_rank, layers=layers)
        messages += [(op, count * often) for op in unit.gathers]
        messages += [(op, count * scatters) for op in unit.scatters]
    return messages


def _beside_us(rank: Rank, own_us: float, messages: Sequence[Sent]) -> float:
    """Least time of compute beside messages: both slow each other, or take turns if faster."""
    sent_us = sum(count * op.duration_us for op, count in messages)
    slowdowns = [min(op.beside or (rank.book.contention,)) for op, _ in messages if op.duration_us]
    return side_by_side_us(own_us, sent_us, min(TAKING_TURNS, *slowdowns))
