"""A plan's stages as ranks: their layers, their memory, and the least time they can take."""

from __future__ import annotations

from dataclasses import replace

from compose.simulate.memory_plan import Sizes, rank_memory
from compose.simulate.pipeline import in_flight
from compose.simulate.rank import Rank
from compose.simulate.stages import Chunk, partition


def chunks_of(rank: Rank) -> list[Chunk]:
    """The model's chunks, the same for all plans with as many."""
    memo, key = rank.model.memo, ("chunks", rank.plan.pp, rank.plan.virtual)
    if key not in memo:
        memo[key] = partition(rank.model.layers, rank.plan)
    found: list[Chunk] = memo[key]
    return found


def stages_of(rank: Rank) -> list[Rank]:
    """Each rank of the pipeline with all its layers, over its virtual stages."""
    return [replace(rank, layers=sizes.layers) for sizes, _ in _held(rank)]


def _held(rank: Rank) -> list[tuple[Sizes, list[int]]]:
    """Of each rank of the pipeline its layers' sizes, and by chunk what forward leaves."""
    memo, key = rank.model.memo, ("held", rank.plan.pp, rank.plan.virtual)
    if key not in memo:
        chunks, pp = chunks_of(rank), rank.plan.pp
        memo[key] = [
            (
                Sizes.of(tuple(x for c in chunks[r::pp] for x in c.layers)),
                [sum(x.saved_bytes * k for x, k in c.runs) for c in chunks[r::pp]],
            )
            for r in range(pp)
        ]
    found: list[tuple[Sizes, list[int]]] = memo[key]
    return found


def memory(rank: Rank, optimizer: str) -> dict[str, int]:
    """Of the fullest rank, by what it is for."""
    plan = rank.plan
    update = rank.model.update_share
    if plan.pp == 1:
        return rank_memory(Sizes.of(rank.layers), plan, optimizer, update)
    found = []
    for r, (sizes, saved) in enumerate(_held(rank)):
        held = in_flight(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        kept = sum(n * nbytes for n, nbytes in zip(held, saved, strict=True))
        tied = rank.model.frame.tied_bytes if r == plan.pp - 1 else 0
        found.append(rank_memory(sizes, plan, optimizer, update, kept, tied))
    return max(found, key=lambda m: sum(m.values()))


def least_us(rank: Rank) -> float:
    """A time the iteration cannot be shorter than: compute on the way of one micro-batch.

    The first micro-batch's forward on its way to a rank, all of that rank's work, and the last
    one's backward on its way back; what may be put off to fill the bubble is left out.
    """
    plan, layers = rank.plan, rank.model.layers
    if plan.pp == 1:
        whole_us = sum(
            x.layer.count * (x.forward_work.lane_us + x.backward_work.lane_us) for x in layers
        )
        return plan.microbatches * whole_us
    memo, key = rank.model.memo, ("loads", plan.pp, plan.virtual, plan.schedule)
    if key not in memo:
        memo[key] = _loads_us(rank)
    loads, ways = memo[key]
    least, before = 0.0, 0.0
    for load_us, way_us in zip(loads, ways, strict=True):
        least = max(least, before + plan.microbatches * load_us)
        before += way_us
    return float(least)


def _loads_us(rank: Rank) -> tuple[list[float], list[float]]:
    """Per rank: a micro-batch's compute on all its layers, and what is on the others' way."""
    chunks, pp = chunks_of(rank), rank.plan.pp
    each = []
    for c in chunks:
        us = sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in c.runs)
        off = sum(n * x.weight_us for x, n in c.runs) if rank.plan.schedule == "zb" else 0.0
        each.append((us, us - off))
    loads = [sum(us for us, _ in each[r::pp]) for r in range(pp)]
    return loads, [each[r][1] for r in range(pp)]
