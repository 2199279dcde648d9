"""A pipeline of ranks: the runs of each chunk of layers, the messages between them, their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import TypeVar

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.graph.codecs import Codec
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.priced_op import PricedOp, priceable
from itercast.compose.simulate.breakdown import Shares, added_up
from itercast.compose.simulate.data_parallel import reductions
from itercast.compose.simulate.fsdp import is_apart
from itercast.compose.simulate.pipeline import (
    CUT_BACKWARD,
    FIRST,
    KEPT,
    Ending,
    StageTimes,
    chunks_of_rank,
    endings,
    finish_us,
    loads_us,
    program,
    rank_of_chunk,
    run_as,
    variants,
)
from itercast.compose.simulate.rank import Pause, Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stages import Chunk, chunks_of, crossing_bytes, stages_of
from itercast.microbench.hardware.stack import stack_of_row

SCHEDULE_SHARE: float = assumed(__file__, "schedule_share")
STEADY_STEPS = 3  # after which each further step of a pipeline that never drains takes as long
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageRuns:
    """Forward and backward of one chunk of layers, of any micro-batch but the last.

    ``runs``: by kind of action; ``others``: those that differ, by kind and variant. ``detached``:
    no gradient comes back from the next chunk.
    """

    runs: Mapping[str, Run]
    others: Mapping[tuple[str, str], Run]
    detached: bool

    def of(self, kind: str, variant: str) -> Run:
        """The run of an action."""
        return self.others.get((kind, variant), self.runs[kind])

    def times(self, sends: Sequence[PricedOp]) -> StageTimes:
        """The chunk's times, with those of the messages to the next chunk."""
        us = {kind: run.end_us for kind, run in self.runs.items()}
        return StageTimes(
            forward_us=us["F"],
            backward_us=us["A"],
            input_us=us.get("B", 0.0),
            weight_us=us.get("W", 0.0),
            others_us={of: run.end_us for of, run in self.others.items()},
            send_us=sum(op.duration_us for op in sends),
            detached=self.detached,
        )


def stage_facts(rank: Rank) -> tuple[object, ...]:
    """What decides a stage's runs beside its layers, as a key of caches."""
    axes = ("shard", "replicate", "expert", "expert_shard", "expert_replicate")
    groups = (rank.cluster.groups[axis] for axis in axes)
    shared = (rank.book, rank.ranks_per_core, rank.cluster.place, rank.cluster.crossings)
    plan = rank.plan
    cut = plan.schedule in CUT_BACKWARD
    return (plan.microbatches > 1, plan.virtual > 1, cut, rank.strategy, *groups, *shared)


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
    whole_bytes = crossing_bytes(rank, chunk)
    per_node = rank.cluster.groups["pp"].per_node
    sender, receiver = (rank_of_chunk(plan.schedule, plan.pp, c) for c in (i, i + 1))
    if sender == receiver:
        return ()
    axis = "intra_node" if sender // per_node == receiver // per_node else "inter_node"
    dtype = next((p.dtype for x, _ in chunk.runs for p in x.layer.parameters), "fp32")
    is_shared = plan.tp > 1 and not plan.sp
    sent_bytes = max(1, whole_bytes // plan.tp) if is_shared else whole_bytes
    sizes = [("send_recv", axis, sent_bytes)]
    sizes += [("all_gather", "tp", whole_bytes)] if is_shared else []
    codec = Codec.of(plan.compress_pp)
    ratio = codec.ratio(dtype) if codec else 1.0
    messages = [
        Message(kind=kind, axis=on, message_bytes=max(1, round(nbytes * ratio)), dtype=dtype)
        for kind, on, nbytes in sizes
    ]
    sent = price_messages(messages, rank.book, rank.cluster)
    if codec is None:
        return sent
    itemsize = ITEMSIZE_BYTES[dtype]
    share = TensorSpec(shape=(sent_bytes // itemsize,), dtype=dtype)
    whole = TensorSpec(shape=(whole_bytes // itemsize,), dtype=dtype)
    encode = codec.encode(share, codec.coded(share, -2), "comm")
    decode = codec.decode(codec.coded(whole, -2), whole, "comm")
    first, last = rank.book.price([priceable(encode), priceable(decode)])
    return [first, *sent, last]


def stage_runs(rank: Rank, chunk: Chunk) -> StageRuns:
    """The runs of a chunk: forward (F), backward (A), or gradients of inputs (B) and weights (W).

    Variants: in the step's first micro-batch (FIRST), with parameters still gathered (KEPT).
    """
    each = rank.strategy.scatters_each

    def run(kind: str, variant: str = "") -> Run:
        """Simulate one action of the chunk by itself."""
        layers = _sharded(rank, chunk.layers, variant)
        program = _begun(replace(rank, layers=_part(layers, kind)), kind)
        if kind == "F":
            program.forward(last=False)
        else:
            later = variant != FIRST and kind != "B"
            program.backward(later=later, sync=each and kind != "B")
        return program.run()

    kinds = "FABW" if rank.plan.schedule in CUT_BACKWARD else "FA"
    differ = [(kind, FIRST) for kind in kinds if kind in "AW"]
    if rank.strategy.whole_after_backward and rank.strategy.regather:
        differ += [("F", FIRST), *((kind, KEPT) for kind in kinds if kind != "W")]
    return StageRuns(
        runs={kind: run(kind) for kind in kinds},
        others={of: run(*of) for of in differ},
        detached=chunk.is_detached(rank.model.graph.capture),
    )


def _sharded(rank: Rank, layers: Sequence[PricedLayer], variant: str) -> Sequence[PricedLayer]:
    """The layers of a chunk; those that are still gathered when the action begins need no gather.

    FSDP2 keeps the root gathered from the first forward on, other layers from a backward to the
    next forward.
    """
    if variant == FIRST or not (rank.strategy.whole_after_backward and rank.strategy.regather):
        return layers
    return [x if is_apart(rank, x) and variant != KEPT else x.whole for x in layers]


def _part(layers: Sequence[PricedLayer], kind: str) -> tuple[PricedLayer, ...]:
    """The layers as an action of this kind runs them: of B and W only that part of backward."""
    if kind not in "BW":
        return tuple(layers)
    return tuple(x.to_inputs if kind == "B" else x.to_weights for x in layers)


def _begun(
    stage: Rank, kind: str, pauses: Mapping[int, Pause] = MappingProxyType({})
) -> RankProgram:
    """The empty program of a pipeline action, with the host's work for the messages it waits for.

    ``kind`` W, weight gradients, waits for none. Where the software does not make the host wait for
    messages (``Stack.waits``), the host runs ahead of the device.
    """
    ahead = stage.plan.virtual > 1 or not stack_of_row(stage.book.stack).waits
    program = RankProgram(stage, ahead=ahead, pauses=pauses)
    if kind != "W":
        half = python_op("pipeline_micro", 1, stage.book, SCHEDULE_SHARE)
        program.lanes.work(stage.layers[0].fold([half]), "schedule")
    return program


@dataclass(frozen=True, kw_only=True)
class Tail:
    """A rank's step from the start of its chunks' last backwards to its end.

    ``run`` ends with synchronisation and optimizer, ``alone`` has the backwards alone.
    """

    start_us: float
    run: Run
    alone: Run

    @property
    def added_us(self) -> float:
        """What synchronisation and optimizer add."""
        return self.run.end_us - self.alone.end_us


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A plan's stages with their times.

    ``ranks`` by stage: all layers, priced on the stage's device; ``stages``: those with its own
    layers. ``tails`` by rank; ``sends``: the messages after each chunk.
    """

    ranks: Sequence[Rank]
    sends: Sequence[Sequence[PricedOp]]
    runs: Sequence[StageRuns]
    times: Sequence[StageTimes]
    stages: Sequence[Rank]
    tails: Sequence[Tail]

    @property
    def plan(self) -> ParallelPlan:
        """The plan of all ranks."""
        return self.ranks[0].plan

    def finish_us(self, times: Sequence[StageTimes]) -> tuple[float, ...]:
        """When each rank's last backward ends; in cyclic data parallelism a further step's time."""
        plan, micro = self.plan, self.plan.microbatches
        if not plan.cdp:
            return finish_us(plan.schedule, times, plan.pp, micro)
        mean = [  # over micro-batches, as the backward of the first one differs
            replace(t, backward_us=fmean([t.of("A", FIRST), *[t.backward_us] * (micro - 1)]))
            for t in times
        ]
        before, after = (
            finish_us(plan.schedule, mean, plan.pp, steps * micro)
            for steps in (STEADY_STEPS, STEADY_STEPS + 1)
        )
        return tuple(b - a for a, b in zip(before, after, strict=True))

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        if self.plan.cdp:  # other stages go on while one updates its weights
            busy = zip(self.finish_us(self.times), self.loads_us(), self.tails, strict=True)
            return [max(end_us, load_us + tail.added_us) for end_us, load_us, tail in busy]
        return [tail.start_us + tail.run.end_us for tail in self.tails]

    def loads_us(self) -> list[float]:
        """Time of each rank's forwards and backwards."""
        plan = self.plan
        return list(loads_us(plan.schedule, self.times, plan.pp, plan.microbatches))

    def chunks_of(self, r: int) -> list[int]:
        """The chunks of a rank."""
        plan = self.plan
        return chunks_of_rank(plan.schedule, plan.pp, r, len(self.runs))

    def runs_of(self, r: int) -> list[tuple[Run, int]]:
        """All that a rank runs, each with how often it is repeated; the last one ends the step."""
        plan, mine, tail = self.plan, self.chunks_of(r), self.tails[r]
        order = program(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        times = Counter[tuple[str, int, str]]()  # by kind, chunk of the rank, and variant
        for (action, _, v), variant in zip(order, variants(order), strict=True):
            kind = run_as(action, plan.schedule)
            # what the first backward leaves out, ``lanes_of`` takes off
            times[kind, v, "" if kind in "AW" and variant == FIRST else variant] += 1
        runs = [(self.runs[mine[v]].of(kind, x), n) for (kind, v, x), n in times.items()]
        return [*runs, (tail.alone, -1), (tail.run, 1)]

    def lanes_of(self, r: int) -> Shares:
        """A rank's time on its lanes: all micro-batches, synchronisation and optimizer."""
        plan, mine = self.plan, self.chunks_of(r)
        order = program(plan.schedule, plan.pp, r, plan.microbatches, plan.virtual)
        ran = dict.fromkeys((run_as(kind, plan.schedule), v) for kind, _, v in order)
        omitted_us = 0.0  # by the first micro-batch
        for runs, kind in ((self.runs[mine[v]], kind) for kind, v in ran if kind in "AW"):
            omitted_us += max(0.0, runs.runs[kind].end_us - runs.of(kind, FIRST).end_us)
        return added_up(self.runs_of(r)).plus(Shares(end_us=omitted_us, compute_us=omitted_us), -1)

    def others_of(self, r: int) -> list[tuple[PricedOp, float]]:
        """Messages between stages and host work of rank ``r``, with how often each occurs.

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
        """Time that messages between stages add; bubble if all stages were as the slowest."""
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
    """``of(ranks[i])[i]`` for each i: each rank's own entry of its list; short lists repeat.

    ``of`` is called once for ranks that are one object.
    """
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
    times = [x.times(sent) for x, sent in zip(runs, sends, strict=True)]
    stages = by_rank(ranks, stages_of)
    ends = endings(plan.schedule, times, plan.pp, plan.microbatches)
    return Pipeline(
        ranks=ranks,
        sends=sends,
        runs=runs,
        times=times,
        stages=stages,
        tails=stage_tails(ranks, stages, ends, optimizer),
    )


def stage_tails(
    ranks: Sequence[Rank],
    stages: Sequence[Rank],
    ends: Sequence[Sequence[Ending]],
    optimizer: str,
) -> list[Tail]:
    """How each stage ends; stages with equal layers and equal pauses share their runs."""
    ends_apart = ranks[0].plan.schedule not in V_SHAPED  # first and last chunk on unlike ranks
    keyed = list[tuple[Hashable, Callable[[], tuple[Run, Run]]]]()
    for i, (rank, stage, own) in enumerate(zip(ranks, stages, ends, strict=True)):
        tied = sum(p.nbytes for p in rank.model.graph.tied if p.ready_after >= 0)
        tied_bytes = tied if ends_apart and i in (0, len(stages) - 1) else 0
        after = tuple(replace(e, chunk=0, start_us=e.start_us - own[0].start_us) for e in own)
        key = ("tail", tuple(map(id, stage.layers)), stage.starts, after, tied_bytes, optimizer)
        make = partial(_tail, stage, after, tied_bytes, optimizer)
        keyed.append(((*key, stage_facts(rank)), make))
    fresh = [x for x, (key, _) in zip(stages, keyed, strict=True) if key not in x.model.once]
    for first in {id(stage.book): stage for stage in fresh}.values():
        book, alike = first.book, [stage for stage in fresh if stage.book is first.book]
        messages = [m for x in alike for m in reductions(x.layers, x.strategy, x.cluster, x.starts)]
        programs = [RankProgram(stage) for stage in alike]
        messages += [m for program in programs for m in program.regathered()]
        price_messages(messages, book, first.cluster)  # one call of the pricer for all of them
        book.prefetch([op for program in programs for op in program.own_update()])
    runs = [stage.model.once(key, make) for stage, (key, make) in zip(stages, keyed, strict=True)]
    return [
        Tail(start_us=own[0].start_us, run=run, alone=alone)
        for own, (run, alone) in zip(ends, runs, strict=True)
    ]


def _tail(stage: Rank, after: Sequence[Ending], tied_bytes: int, optimizer: str) -> tuple[Run, Run]:
    """A stage's last backwards with synchronisation and optimizer, and the backwards alone.

    ``after``: its chunks' last actions, the first of which starts at 0.
    """
    edges = pairwise((0, *stage.starts, len(stage.layers)))  # first layer, and the next chunk's
    chunks = list(zip(edges, reversed(after), strict=True))
    pauses = {stop - 1: (end.start_us, end.busy_us) for (_, stop), end in chunks[:-1]}
    layers = tuple(
        x
        for (start, stop), end in chunks
        for x in _part(_sharded(stage, stage.layers[start:stop], end.variant), end.kind)
    )
    own = replace(stage, layers=layers)
    tail, alone = (_begun(own, after[0].kind, pauses) for _ in range(2))
    later = stage.plan.microbatches > 1
    tail.backward(later=later, sync=True)
    if tied_bytes:
        tail.reduce_tied(tied_bytes)
    tail.update(optimizer)
    alone.backward(later=later, sync=stage.strategy.scatters_each)
    return tail.run(), alone.run()
