"""Lower bounds of a plan's time: what its ranks compute, and what FSDP sends beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from itercast.compose.machines.contention import TAKING_TURNS
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.simulate.fsdp import Unit
from itercast.compose.simulate.pipeline import CUT_BACKWARD
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stage_rank import stage_facts
from itercast.compose.simulate.stages import chunks_of, dealt

Run = tuple[PricedLayer, int]


def gpu_us(rank: Rank) -> float:
    """Time that all GPUs of a plan compute in a step."""
    return mean_us(rank) * rank.plan.world_size


def mean_us(rank: Rank) -> float:
    """The mean over stages of the compute of all micro-batches, however layers are dealt."""
    plan = rank.plan
    return plan.microbatches * compute_us([(x, x.layer.count) for x in rank.model.layers]) / plan.pp


def compute_us(runs: Sequence[Run]) -> float:
    """A micro-batch's compute on these layers."""
    return sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in runs)


def least_us(rank: Rank) -> float:
    """A lower bound of the iteration: what any schedule must do one after the other.

    The first micro-batch's forward on the stages before a rank, all of that rank's work, and the
    last one's backward on its way back, without the weight gradients that may fill the bubble.
    """
    plan = rank.plan
    facts = stage_facts(rank) if _gathers_in_each(rank) else ()
    key = ("loads", *plan.parts("stages"), plan.schedule, facts)
    loads, ways = rank.model.once(key, partial(_loads_us, rank))
    least, before = 0.0, 0.0
    for load_us, way_us in zip(loads, ways, strict=True):
        least = max(least, before + plan.microbatches * load_us)
        before += way_us
    return float(least)


def _gathers_in_each(rank: Rank) -> bool:
    """Whether FSDP gathers parameters in each micro-batch."""
    return rank.strategy.by_layer and rank.strategy.every_micro


def _loads_us(rank: Rank) -> tuple[list[float], list[float]]:
    """By rank a micro-batch's time on all its layers, and the compute that others wait for."""
    chunks, cut = chunks_of(rank), rank.plan.schedule in CUT_BACKWARD
    known = dict[object, tuple[float, float]]()
    for c in {c.key: c for c in chunks}.values():
        off = sum(n * x.weight_us for x, n in c.runs) if cut else 0.0
        known[c.key] = (_micro_us(rank, c.runs), compute_us(c.runs) - off)
    each = [known[c.key] for c in chunks]
    loads = [sum(us for us, _ in mine) for mine in dealt(rank.plan, each)]
    return loads, [each[r][1] for r in range(rank.plan.pp)]


def _micro_us(rank: Rank, runs: Sequence[Run]) -> float:
    """The least time of a micro-batch on these layers: compute, beside what FSDP sends for each.

    They slow each other, as long as that beats taking turns.
    """
    us, how = compute_us(runs), rank.strategy
    if not _gathers_in_each(rank):
        return us
    own = replace(rank, layers=tuple(x for x, _ in runs))
    root = Unit(rank=own, layers=tuple(x for x, n in runs for _ in range(n) if not x.numbered))
    scatters = int(how.scatters_each)
    sent = [*((op, 1) for op in root.gathers), *((op, scatters) for op in root.scatters)]
    for x, n in runs:
        if x.numbered:
            unit = Unit(rank=own, layers=(x,))
            sent += [(op, n * (1 + (how.regather and x.fetches))) for op in unit.gathers]
            sent += [(op, n * scatters) for op in unit.scatters]
    sent_us = sum(n * op.duration_us for op, n in sent)
    slowdowns = [min(op.beside or (rank.book.contention,)) for op, _ in sent if op.duration_us]
    return side_by_side_us(us, sent_us, min(TAKING_TURNS, *slowdowns))
