"""A pipeline's stages as ranks: layers, memory, runs, messages, and a lower bound of their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
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
from itercast.compose.simulate.memory_plan import Sizes, rank_memory
from itercast.compose.simulate.pipeline import (
    CUT_BACKWARD,
    StageTimes,
    chunks_of_rank,
    finish_us,
    in_flight,
    rank_of_chunk,
)
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stages import Chunk, partition, with_tied
from itercast.microbench.hardware.stack import stack_of_row

SCHEDULE_SHARE: float = assumed(__file__, "schedule_share")
T = TypeVar("T")


def chunks_of(rank: Rank) -> list[Chunk]:
    """The model's chunks of layers; plans with as many chunks share them.

    The last one has copies of weights that it ties to those of the first, if on another rank.
    """

    def cut() -> list[Chunk]:
        chunks = partition(rank.model.layers, rank.plan)
        # where the first rank has the last chunk
        shared = rank.plan.pp == 1 or rank.plan.schedule in V_SHAPED
        return chunks if shared else [*chunks[:-1], with_tied(chunks[-1], rank.model)]

    return rank.model.once(("chunks", *_layout(rank.plan)), cut)


def _layout(plan: ParallelPlan) -> tuple[object, ...]:
    """What of a plan changes which layers a rank has."""
    return (plan.schedule in V_SHAPED, *plan.parts("stages"))


def stages_of(rank: Rank) -> list[Rank]:
    """One rank for each pipeline stage, with the layers of all virtual stages that it holds."""
    dealt = _dealt(rank.plan, chunks_of(rank))
    starts = [tuple(accumulate(len(c.layers) for c in mine))[:-1] for mine in dealt]
    return [
        replace(rank, layers=sizes.layers, starts=own)
        for (sizes, _), own in zip(_held(rank), starts, strict=True)
    ]


Held = tuple[Sizes, list[int]]  # of a rank's layers, and by chunk the bytes saved for backward


def _held(rank: Rank) -> list[Held]:
    """By rank of the pipeline the sizes of its layers, and by chunk what forward saves."""

    def sizes(chunks: Sequence[Chunk]) -> Held:
        saved = [sum(x.saved_bytes * n for x, n in c.runs) for c in chunks]
        return Sizes.of([run for c in chunks for run in c.runs]), saved

    def held() -> list[Held]:
        dealt = _dealt(rank.plan, chunks_of(rank))
        keys = [("sizes", *(c.key for c in chunks)) for chunks in dealt]  # stages may be equal
        pairs = zip(keys, dealt, strict=True)
        return [rank.model.once(key, partial(sizes, chunks)) for key, chunks in pairs]

    return rank.model.once(("held", *_layout(rank.plan)), held)


def _dealt(plan: ParallelPlan, chunks: Sequence[T]) -> list[list[T]]:
    """By rank what belongs to its chunks."""
    ranks = (chunks_of_rank(plan.schedule, plan.pp, r, len(chunks)) for r in range(plan.pp))
    return [[chunks[c] for c in mine] for mine in ranks]


def memory(rank: Rank, optimizer: str) -> dict[str, int]:
    """Peak memory of the fullest rank, by purpose: of ranks with equal layers one is enough."""
    most = dict[int, tuple[Sizes, int]]()
    for sizes, others in _in_flight(rank):
        if id(sizes) not in most or most[id(sizes)][1] < others:
            most[id(sizes)] = (sizes, others)
    each = (_memory(rank, optimizer, *held) for held in most.values())
    return max(each, key=lambda m: sum(m.values()))


def stage_memory(rank: Rank, optimizer: str) -> list[dict[str, int]]:
    """Peak memory of each rank of a pipeline, by purpose; of one where there is none."""
    return [_memory(rank, optimizer, *held) for held in _in_flight(rank)]


def _in_flight(rank: Rank) -> Iterator[tuple[Sizes, int]]:
    """By rank of a pipeline the sizes of its layers, and bytes of other micro-batches' results."""
    plan = rank.plan
    for r, (sizes, saved) in enumerate(_held(rank)):
        held = in_flight(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        others = sum((n - 1) * nbytes for n, nbytes in zip(held, saved, strict=True))
        yield sizes, max(0, others)


def _memory(rank: Rank, optimizer: str, sizes: Sizes, others: int) -> dict[str, int]:
    graph, held = rank.model.graph, stack_of_row(rank.book.stack).held
    update = (graph.update_share, others, graph.matrix_bytes)
    found = rank_memory(sizes, rank.plan, optimizer, *update, held)
    found["activations"] += graph.input_bytes
    return {name: n + rank.model.added_bytes.get(name, 0) for name, n in found.items()}


def least_us(rank: Rank) -> float:
    """A lower bound of the iteration: compute that any schedule must do one after the other.

    The first micro-batch's forward on the stages before a rank, all of that rank's work, and the
    last one's backward on its way back, without the weight gradients that may fill the bubble.
    """
    plan = rank.plan
    if plan.pp == 1:
        return mean_us(rank)
    key = ("loads", *plan.parts("stages"), plan.schedule)
    loads, ways = rank.model.once(key, partial(_loads_us, rank))
    least, before = 0.0, 0.0
    for load_us, way_us in zip(loads, ways, strict=True):
        least = max(least, before + plan.microbatches * load_us)
        before += way_us
    return float(least)


def mean_us(rank: Rank) -> float:
    """The mean over stages of the compute of all micro-batches, however layers are dealt."""
    layers, plan = rank.model.layers, rank.plan
    whole_us = sum(
        x.layer.count * (x.forward_work.lane_us + x.backward_work.lane_us) for x in layers
    )
    return plan.microbatches * whole_us / plan.pp


def _loads_us(rank: Rank) -> tuple[list[float], list[float]]:
    """By rank a micro-batch's compute on all its layers, and the part that others wait for."""
    each, pp, cut = [], rank.plan.pp, rank.plan.schedule in CUT_BACKWARD
    for c in chunks_of(rank):
        us = sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in c.runs)
        off = sum(n * x.weight_us for x, n in c.runs) if cut else 0.0
        each.append((us, us - off))
    loads = [sum(us for us, _ in mine) for mine in _dealt(rank.plan, each)]
    return loads, [each[r][1] for r in range(pp)]


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
    shared = (rank.contention, rank.ranks_per_core, rank.where.node, rank.where.crossings)
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
    plan, size = rank.plan, max(1, chunk.output_bytes)
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
        """When each rank's last backward ends."""
        plan = self.plan
        return finish_us(plan.schedule, times, plan.pp, plan.microbatches)

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        ends = self.finish_us(self.times)
        pairs = zip(ends, self.tails, strict=True)
        return [end_us + tail.end_us - alone.end_us for end_us, (tail, alone) in pairs]

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
        found = [(rank.model.host, micro / self.plan.pp)]
        for chunk in self.chunks_of(r):
            for boundary in (chunk - 1, chunk):
                if 0 <= boundary < len(self.runs) - 1:
                    ways = 1 if self.runs[boundary].detached else 2  # forth and back
                    found += [(op, ways * micro) for op in self.sends[boundary]]
            found.append((python_op("pipeline_micro", 1, rank.book), micro))
        return found

    def schedule_us(self, slowest: int) -> tuple[float, float]:
        """Time that messages between stages add, and the bubble if all stages were the slowest."""
        unsent = [replace(t, send_us=0.0) for t in self.times]
        sends_us = max(0.0, max(self.finish_us(self.times)) - max(self.finish_us(unsent)))
        own = self.chunks_of(slowest)
        equal = [unsent[own[c // self.plan.pp]] for c in range(len(unsent))]
        bubble_us = max(0.0, max(self.finish_us(equal)) - self.loads_us()[slowest])
        return sends_us, bubble_us


def by_rank(ranks: Sequence[Rank], of: Callable[[Rank], Sequence[T]]) -> list[T]:
    """Of each rank its own one of what ``of`` lists for all; once for ranks that are the same."""
    found = {id(rank): of(rank) for rank in {id(r): r for r in ranks}.values()}
    return [found[id(rank)][i % len(found[id(rank)])] for i, rank in enumerate(ranks)]


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
