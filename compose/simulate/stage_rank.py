"""A pipeline of ranks: the runs of each chunk of layers, the messages between them, their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.graph.codecs import Codec
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.priced_op import PricedOp, priceable
from itercast.compose.simulate.breakdown import Shares, added_up
from itercast.compose.simulate.data_parallel import reductions
from itercast.compose.simulate.pipeline import (
    StageTimes,
    chunks_of_rank,
    finish_us,
    rank_of_chunk,
)
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stages import Chunk, chunks_of, stages_of
from itercast.microbench.hardware.stack import stack_of_row

SCHEDULE_SHARE: float = assumed(__file__, "schedule_share")
STEADY_STEPS = 3  # after which each further step of a pipeline that never drains takes as long
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageRuns:
    """Forward and backward of one chunk of layers, of any micro-batch but the first and the last.

    ``accumulate_us``: what the first one's backward leaves out. ``detached``: no gradient comes
    back from the next chunk.
    """

    forward: Run
    backward: Run
    accumulate_us: float
    weight_us: float
    detached: bool

    def times(self, sends: Sequence[PricedOp]) -> StageTimes:
        """Its times, with the messages to the next chunk."""
        return StageTimes(
            forward_us=self.forward.end_us,
            backward_us=self.backward.end_us,
            accumulate_us=self.accumulate_us,
            weight_us=self.weight_us,
            send_us=sum(op.duration_us for op in sends),
            detached=self.detached,
        )


def stage_facts(rank: Rank) -> tuple[object, ...]:
    """What changes a stage's run, apart from its layers."""
    axes = ("shard", "replicate", "expert", "expert_shard", "expert_replicate")
    groups = (rank.where.groups[axis] for axis in axes)
    shared = (rank.book, rank.ranks_per_core, rank.where.node, rank.where.crossings)
    plan = rank.plan
    return (plan.microbatches > 1, plan.virtual > 1, rank.strategy, *groups, *shared)


def stage_messages(rank: Rank) -> list[Sequence[PricedOp]]:
    """The messages over the boundary after each chunk of a pipeline but the last, one way."""
    return [_messages(rank, chunk, i) for i, chunk in enumerate(chunks_of(rank)[:-1])]


def _messages(rank: Rank, chunk: Chunk, i: int) -> Sequence[PricedOp]:
    """The messages over the boundary after chunk ``i``.

    Each of tp ranks that hold the same activation sends a share of it, and those that receive it
    gather the shares (arXiv:2104.04473, section 4.1); with sp each holds a share anyway. Kernels
    that encode a share, and decode all of them, run on the stream of the messages.
    """
    plan = rank.plan
    _, last_layer = rank.model.graph.before_fusion(chunk.runs[-1][0].layer)
    size = max(1, last_layer.output_bytes)
    per_node = rank.where.groups["pp"].per_node
    a, b = (rank_of_chunk(plan.schedule, plan.pp, c) for c in (i, i + 1))
    if a == b:
        return ()
    same = a // per_node == b // per_node
    dtype = next((p.dtype for x, _ in chunk.runs for p in x.layer.parameters), "fp32")
    axis, whole = "intra_node" if same else "inter_node", plan.tp == 1 or plan.sp
    share = size if whole else max(1, size // plan.tp)
    codec = Codec.of(plan.compress_pp)
    ratio = codec.ratio(dtype) if codec else 1.0
    sizes = [("send_recv", axis, share), *([] if whole else [("all_gather", "tp", size)])]
    messages = [
        Message(kind=kind, axis=on, message_bytes=max(1, round(n * ratio)), dtype=dtype)
        for kind, on, n in sizes
    ]
    sent = price_messages(messages, rank.book, rank.where)
    if codec is None:
        return sent
    sides = [TensorSpec(shape=(n // ITEMSIZE_BYTES[dtype],), dtype=dtype) for n in (share, size)]
    codes = [codec.coded(t, -2) for t in sides]
    kernels = (codec.encode(sides[0], codes[0], "comm"), codec.decode(codes[1], sides[1], "comm"))
    first, last = rank.book.price([priceable(c) for c in kernels])
    return [first, *sent, last]


def stage_runs(rank: Rank, chunk: Chunk) -> StageRuns:
    """The runs of a chunk; the host is ahead of the device if it does not wait for messages.

    Source of what it waits for: ``Stack.waits``.
    """
    stage, each = replace(rank, layers=chunk.layers), rank.strategy.every_micro
    ahead = rank.plan.virtual > 1 or not stack_of_row(rank.book.stack).waits
    forward, *backward = (RankProgram(stage, ahead=ahead) for _ in range(3))
    half = python_op("pipeline_micro", 1, rank.book, SCHEDULE_SHARE)
    for program in (forward, *backward):
        program.lanes.work(chunk.layers[0].fold([half]), "schedule")
    forward.forward(last=False)
    later, first = backward
    later.backward(later=True, sync=each)
    first.backward(later=False, sync=each)
    run = later.run()
    return StageRuns(
        forward=forward.run(),
        backward=run,
        accumulate_us=max(0.0, run.end_us - first.run().end_us),
        weight_us=sum(x.weight_us * n for x, n in chunk.runs),
        detached=chunk.is_detached(rank.model.graph.capture),
    )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A plan's stages with their times.

    ``ranks`` by stage: all layers, priced on the stage's device; ``stages``: those with its own
    layers. ``tails`` by rank: the run from its last backward to the end of the iteration, and that
    backward without synchronisation and optimizer. ``sends``: the messages after each chunk.
    """

    ranks: Sequence[Rank]
    sends: Sequence[Sequence[PricedOp]]
    runs: Sequence[StageRuns]
    times: Sequence[StageTimes]
    stages: Sequence[Rank]
    tails: Sequence[tuple[Run, Run]]

    @property
    def plan(self) -> ParallelPlan:
        """The plan of all ranks."""
        return self.ranks[0].plan

    def finish_us(self, times: Sequence[StageTimes]) -> tuple[float, ...]:
        """When each rank's last backward ends; of ``cyclic`` steps, what a further step adds."""
        plan = self.plan
        if not plan.cdp:
            return finish_us(plan.schedule, times, plan.pp, plan.microbatches)
        micro = plan.microbatches
        mean = [replace(t, backward_us=t.busy_us(micro) / micro - t.forward_us) for t in times]
        before, after = (
            finish_us(plan.schedule, mean, plan.pp, steps * micro)
            for steps in (STEADY_STEPS, STEADY_STEPS + 1)
        )
        return tuple(b - a for a, b in zip(before, after, strict=True))

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        ends = self.finish_us(self.times)
        last_us = [tail.end_us - alone.end_us for tail, alone in self.tails]
        if self.plan.cdp:  # other stages go on while one updates its weights
            busy = zip(ends, self.loads_us(), last_us, strict=True)
            return [max(end_us, load_us + us) for end_us, load_us, us in busy]
        return [end_us + us for end_us, us in zip(ends, last_us, strict=True)]

    def loads_us(self) -> list[float]:
        """Time of each rank's forwards and backwards."""
        pp, micro = self.plan.pp, self.plan.microbatches
        return [sum(self.times[c].busy_us(micro) for c in self.chunks_of(r)) for r in range(pp)]

    def chunks_of(self, r: int) -> list[int]:
        """The chunks of a rank."""
        plan = self.plan
        return chunks_of_rank(plan.schedule, plan.pp, r, len(self.runs))

    def runs_of(self, r: int) -> list[tuple[Run, int]]:
        """All that a rank runs, each with how often it is repeated; the last one ends the step."""
        micro, (tail, alone) = self.plan.microbatches, self.tails[r]
        pairs = ((self.runs[c].forward, self.runs[c].backward) for c in self.chunks_of(r))
        return [*((run, micro) for both in pairs for run in both), (alone, -1), (tail, 1)]

    def lanes_of(self, r: int) -> Shares:
        """A rank's time on its lanes: all micro-batches, synchronisation and optimizer."""
        left_out_us = sum(self.runs[c].accumulate_us for c in self.chunks_of(r))
        return added_up(self.runs_of(r)).plus(Shares(left_out_us, left_out_us, 0.0, 0.0), -1)

    def others_of(self, r: int) -> list[tuple[PricedOp, float]]:
        """What else takes a rank's time: messages between stages, and the host, each so often.

        The model's own host time is divided equally among the stages.
        """
        rank, micro = self.ranks[r], self.plan.microbatches
        timed = [(rank.model.host, micro / self.plan.pp)]
        for chunk in self.chunks_of(r):
            for boundary in (chunk - 1, chunk):
                if 0 <= boundary < len(self.runs) - 1:
                    ways = 1 if self.runs[boundary].detached else 2  # forth and back
                    timed += [(op, ways * micro) for op in self.sends[boundary]]
            timed.append((python_op("pipeline_micro", 1, rank.book), micro))
        return timed

    def schedule_us(self, slowest: int) -> tuple[float, float]:
        """Time that messages between stages add, and the bubble if all stages were the slowest."""
        unsent = [replace(t, send_us=0.0) for t in self.times]
        sends_us = max(0.0, max(self.finish_us(self.times)) - max(self.finish_us(unsent)))
        chunks = self.chunks_of(slowest)
        equal = [unsent[chunks[c // self.plan.pp]] for c in range(len(unsent))]
        bubble_us = max(0.0, max(self.finish_us(equal)) - self.loads_us()[slowest])
        return sends_us, bubble_us

    def host_gap_us(self, r: int, idle_us: float) -> float:
        """The part of a rank's idle time in which its host launches: all but the schedule's."""
        return idle_us


def by_rank(ranks: Sequence[Rank], of: Callable[[Rank], Sequence[T]]) -> list[T]:
    """Of each rank its own one of what ``of`` lists for all; once for ranks that are the same."""
    listed = {id(rank): of(rank) for rank in {id(r): r for r in ranks}.values()}
    return [listed[id(rank)][i % len(listed[id(rank)])] for i, rank in enumerate(ranks)]


def pipeline_of(ranks: Sequence[Rank], optimizer: str) -> Pipeline:
    """The pipeline of these ranks, one of each stage, which holds all layers."""
    plan = ranks[0].plan
    pieces = range(plan.pp * plan.virtual)
    owners = [ranks[rank_of_chunk(plan.schedule, plan.pp, c)] for c in pieces]
    chunks, sends = by_rank(owners, chunks_of), [*by_rank(owners[:-1], stage_messages), ()]
    runs = [
        x.model.once(("stage runs", chunk.key, stage_facts(x)), partial(stage_runs, x, chunk))
        for x, chunk in zip(owners, chunks, strict=True)
    ]
    return Pipeline(
        ranks=ranks,
        sends=sends,
        runs=runs,
        times=[x.times(sent) for x, sent in zip(runs, sends, strict=True)],
        stages=by_rank(ranks, stages_of),
        tails=by_rank(ranks, lambda r: stage_tails(r, stages_of(r), optimizer)),
    )


def stage_tails(rank: Rank, stages: Sequence[Rank], optimizer: str) -> list[tuple[Run, Run]]:
    """By stage the runs of ``_tail``; stages with the same layers share them."""
    facts, last = stage_facts(rank), len(stages) - 1
    size = sum(p.nbytes for p in rank.model.graph.tied if p.ready_after >= 0)
    apart = rank.plan.schedule not in V_SHAPED
    ties = [size if apart and i in (0, last) else 0 for i in range(len(stages))]
    keys = [
        ("tail", tuple(map(id, stage.layers)), stage.starts, tied, optimizer, facts)
        for stage, tied in zip(stages, ties, strict=True)
    ]
    fresh = [x for x, key in zip(stages, keys, strict=True) if key not in rank.model.once]
    messages = [m for x in fresh for m in reductions(x.layers, x.strategy, x.where, x.starts)]
    price_messages(messages, rank.book, rank.where)  # one call of the pricer for all of them
    return [
        rank.model.once(key, partial(_tail, stage, tied, optimizer))
        for stage, tied, key in zip(stages, ties, keys, strict=True)
    ]


def _tail(stage: Rank, tied_bytes: int, optimizer: str) -> tuple[Run, Run]:
    """A stage's last backward with synchronisation and optimizer; that backward alone."""
    tail, alone, later = RankProgram(stage), RankProgram(stage), stage.plan.microbatches > 1
    tail.backward(later=later, sync=True)
    if tied_bytes:
        tail.reduce_tied(tied_bytes)
    tail.update(optimizer)
    alone.backward(later=later, sync=stage.strategy.every_micro)
    return tail.run(), alone.run()
