"""A plan's stages as ranks: their layers, their memory, and a lower bound of their time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from compose.simulate.memory_plan import Sizes, rank_memory
from compose.simulate.pipeline import in_flight
from compose.simulate.rank import Rank
from compose.simulate.stages import Chunk, partition


def chunks_of(rank: Rank) -> list[Chunk]:
    """The model's chunks of layers; plans with as many chunks share them."""
    key = ("chunks", rank.plan.pp, rank.plan.virtual)
    return rank.model.once(key, partial(partition, rank.model.layers, rank.plan))


def stages_of(rank: Rank) -> list[Rank]:
    """Each rank of the pipeline with all its layers, over its virtual stages."""
    return [replace(rank, layers=sizes.layers) for sizes, _ in _held(rank)]


Held = tuple[Sizes, list[int]]  # of a rank's layers, and by chunk the bytes saved for backward


def _held(rank: Rank) -> list[Held]:
    """By rank of the pipeline the sizes of its layers, and by chunk what forward saves."""
    key = ("held", rank.plan.pp, rank.plan.virtual)
    return rank.model.once(key, partial(_sizes_by_rank, rank))


def _sizes_by_rank(rank: Rank) -> list[Held]:
    chunks, pp = chunks_of(rank), rank.plan.pp
    return [
        (
            Sizes.of(tuple(x for c in chunks[r::pp] for x in c.layers)),
            [sum(x.saved_bytes * k for x, k in c.runs) for c in chunks[r::pp]],
        )
        for r in range(pp)
    ]


def memory(rank: Rank, optimizer: str) -> dict[str, int]:
    """Peak memory of the fullest rank, by purpose."""
    plan = rank.plan
    update = rank.model.update_share
    if plan.pp == 1:
        return rank_memory(Sizes.of(rank.layers), plan, optimizer, update)
    found = []
    for r, (sizes, saved) in enumerate(_held(rank)):
        held = in_flight(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        kept = sum(n * nbytes for n, nbytes in zip(held, saved, strict=True))
        tied = rank.model.graph.tied_bytes if r == plan.pp - 1 else 0
        found.append(rank_memory(sizes, plan, optimizer, update, kept, tied))
    return max(found, key=lambda m: sum(m.values()))


def least_us(rank: Rank) -> float:
    """A lower bound of the iteration: compute that any schedule must do one after the other.

    The first micro-batch's forward on the stages before a rank, all of that rank's work, and the
    last one's backward on its way back, without the weight gradients that may fill the bubble.
    """
    plan, layers = rank.plan, rank.model.layers
    if plan.pp == 1:
        whole_us = sum(
            x.layer.count * (x.forward_work.lane_us + x.backward_work.lane_us) for x in layers
        )
        return plan.microbatches * whole_us
    key = ("loads", plan.pp, plan.virtual, plan.schedule)
    loads, ways = rank.model.once(key, partial(_loads_us, rank))
    least, before = 0.0, 0.0
    for load_us, way_us in zip(loads, ways, strict=True):
        least = max(least, before + plan.microbatches * load_us)
        before += way_us
    return float(least)


def _loads_us(rank: Rank) -> tuple[list[float], list[float]]:
    """By rank a micro-batch's compute on all its layers, and the part that others wait for."""
    chunks, pp = chunks_of(rank), rank.plan.pp
    each = []
    for c in chunks:
        us = sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in c.runs)
        off = sum(n * x.weight_us for x, n in c.runs) if rank.plan.schedule == "zb" else 0.0
        each.append((us, us - off))
    loads = [sum(us for us, _ in each[r::pp]) for r in range(pp)]
    return loads, [each[r][1] for r in range(pp)]
