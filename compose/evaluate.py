"""A plan's iteration: stages simulated, pipelined, synchronised; where its time and memory go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from compose.collectives import Message, price_messages
from compose.cyclic import slot_message, steady_us
from compose.memory_plan import rank_memory
from compose.pipeline import StageTimes, finish_us, in_flight
from compose.priced import UNMODELLED, PricedOp
from compose.rank import Rank, Run, Stretch
from compose.stages import Chunk, partition
from compose.step import PricedLayer
from compose.timeline import Span, Task


@dataclass
class Tally:
    """Time by family with its bounds; errors within a family add, between families squared."""

    us: dict[str, float] = field(default_factory=dict)
    below: dict[str, float] = field(default_factory=dict)
    above: dict[str, float] = field(default_factory=dict)

    def add(self, ops: Iterable[PricedOp], times: float = 1.0) -> None:
        """Ops that run ``times`` times."""
        for op in ops:
            self.us[op.family] = self.us.get(op.family, 0.0) + times * op.duration_us
            low, high = op.duration_us - op.low_us, op.high_us - op.duration_us
            self.below[op.family] = self.below.get(op.family, 0.0) + times * low
            self.above[op.family] = self.above.get(op.family, 0.0) + times * high

    def add_us(self, family: str, us: float) -> None:
        """Time whose bounds are a factor of two."""
        self.us[family] = self.us.get(family, 0.0) + us
        self.below[family] = self.below.get(family, 0.0) + us / 2
        self.above[family] = self.above.get(family, 0.0) + us

    def bounds(self, iteration_us: float) -> tuple[float, float]:
        """10 and 90 % bounds of the iteration."""
        below, above = (sqrt(sum(v * v for v in d.values())) for d in (self.below, self.above))
        return max(0.0, iteration_us - below), iteration_us + above

    @property
    def unmodelled_frac(self) -> float:
        """Share of the time that no learned model priced."""
        total = sum(self.us.values())
        return self.us.get(UNMODELLED, 0.0) / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A plan's iteration on the slowest rank; iteration = compute + exposed_comm + idle.

    ``idle_us`` by cause: ``host_us`` gaps, ``bubble_us`` of the schedule, ``waiting_us`` for slower
    stages. ``matmul_s``: a rank's matrix products at peak. ``tasks`` show the last
    micro-batch and the optimizer.
    """

    iteration_us: float
    compute_us: float
    exposed_comm_us: float
    comm_us: float
    host_gap_us: float
    bubble_us: float
    waiting_us: float
    memory: dict[str, int]
    tally: Tally
    matmul_s: float
    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]

    @property
    def idle_us(self) -> float:
        """Neither computing nor waiting for a message."""
        return max(0.0, self.iteration_us - self.compute_us - self.exposed_comm_us)

    @property
    def memory_bytes(self) -> int:
        """Peak of the fullest rank."""
        return sum(self.memory.values())


def lane_spans(run: Run, *lanes: str) -> list[Span]:
    """When the lanes' tasks ran."""
    return [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes[0] in lanes]


def covered_us(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans runs."""
    total = end = 0.0
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        total += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return total


@dataclass(frozen=True, slots=True)
class Shares:
    """Time of a run: computing, waiting for messages, and messages whether hidden or not."""

    end_us: float
    compute_us: float
    exposed_us: float
    comm_us: float


def shares(run: Run) -> Shares:
    """What a run's time went to; collectives within compute count as exposed."""
    lane_us = covered_us(lane_spans(run, "compute"))
    sent = lane_spans(run, "comm", "h2d", "d2h")
    exposed_us = covered_us([*lane_spans(run, "compute"), *sent]) - lane_us + run.blocking_us
    comm_us = covered_us(sent) + run.blocking_us
    return Shares(run.end_us, lane_us - run.blocking_us, exposed_us, comm_us)


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """The iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    if rank.plan.pp > 1:
        return _pipelined(rank, optimizer)
    return _alone(rank, optimizer)


def _alone(rank: Rank, optimizer: str) -> Outcome:
    """No pipeline: micro-batches one after the other, the last one synchronised."""
    plan, micro = rank.plan, rank.plan.microbatches
    each = rank.strategy.every_micro or plan.offload == "activations"
    final, tally = Stretch(rank), Tally()
    one: Shares | None = None
    if each and micro > 1:
        run = _micro(rank)
        one = shares(run)
        tally.add([*run.sent, *run.copies], micro - 1)
    else:
        final.quiet(micro - 1)
    final.forward()
    final.backward(later=micro > 1, sync=True)
    final.update(optimizer)
    run = final.run()
    found = shares(run)
    if one is not None:
        more = micro - 1
        found = Shares(
            found.end_us + more * one.end_us,
            found.compute_us + more * one.compute_us,
            found.exposed_us + more * one.exposed_us,
            found.comm_us + more * one.comm_us,
        )
    if plan.cdp:
        found = _cyclic(rank, found)
    _tally_layers(tally, rank.layers, micro)
    tally.add([*run.sent, *run.copies, *run.updates])
    if rank.book.gpu.kind == "cpu":
        tally.add_us("host", rank.model.host_us * micro)
    idle_us = max(0.0, found.end_us - found.compute_us - found.exposed_us)
    return Outcome(
        iteration_us=found.end_us,
        compute_us=found.compute_us,
        exposed_comm_us=found.exposed_us,
        comm_us=found.comm_us,
        host_gap_us=idle_us,
        bubble_us=0.0,
        waiting_us=0.0,
        memory=rank_memory(rank.layers, plan, optimizer),
        tally=tally,
        matmul_s=micro * sum(x.matmul_s for x in rank.layers),
        tasks=run.tasks,
        spans=run.spans,
    )


def _micro(rank: Rank) -> Run:
    stretch = Stretch(rank)
    stretch.forward()
    stretch.backward(later=True, sync=True)
    return stretch.run()


def _tally_layers(tally: Tally, layers: Sequence[PricedLayer], micro: int) -> None:
    counted: dict[int, tuple[PricedLayer, int]] = {}
    for x in layers:
        counted[id(x)] = (x, counted.get(id(x), (x, 0))[1] + 1)
    for x, n in counted.values():
        tally.add([*x.forward, *x.backward], n * micro)
        tally.add(x.accumulate, n * (micro - 1))


def _cyclic(rank: Rank, alone: Shares) -> Shares:
    """The step with messages beside each slot's compute."""
    nbytes = sum(x.layer.trained_bytes for x in rank.layers)
    dtype = next((p.dtype for x in rank.layers for p in x.layer.parameters), "fp32")
    message = slot_message(nbytes, rank.plan.dp, dtype)
    (op,) = price_messages([message], rank.book.pricer, rank.where, rank.book.threads)
    n = rank.plan.dp
    end_us = steady_us(alone.end_us, op.duration_us, n, rank.contention)
    comm_us = 4 * n * op.duration_us
    slowed_us = min(end_us, alone.compute_us + (rank.contention - 1) * min(alone.end_us, comm_us))
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)


def _pipelined(rank: Rank, optimizer: str) -> Outcome:
    plan, micro = rank.plan, rank.plan.microbatches
    chunks = partition(rank.model.layers, plan)
    known: dict[object, StageTimes] = {}
    times = []
    for i, chunk in enumerate(chunks):
        send = _send(rank, chunk, i, len(chunks))
        key = (chunk.key, send.duration_us)
        if key not in known:
            known[key] = _stage_times(rank, chunk, send.duration_us)
        times.append(known[key])
    ends = finish_us(plan.schedule, times, plan.pp, micro)
    stages = [_stage(rank, chunks, r) for r in range(plan.pp)]
    tails = _tails(rank, stages, optimizer)
    totals = [end + tail.end_us - back for end, (tail, back) in zip(ends, tails, strict=True)]
    iteration_us = max(totals)
    loads = [
        sum(times[c].forward_us + times[c].backward_us for c in range(r, len(chunks), plan.pp))
        for r in range(plan.pp)
    ]
    slowest = max(range(plan.pp), key=lambda r: (loads[r], totals[r]))
    return _pipeline_outcome(
        rank, chunks, times, stages, tails, iteration_us, slowest, loads, optimizer
    )


def _send(rank: Rank, chunk: Chunk, i: int, count: int) -> PricedOp:
    """A message over the boundary after chunk i."""
    per_node = rank.where.groups["pp"].per_node
    same = per_node > 1 and (i % rank.plan.pp + 1) % per_node != 0
    dtype = next((p.dtype for x, _ in chunk.runs for p in x.layer.parameters), "fp32")
    size = chunk.output_bytes if i + 1 < count else 0
    message = Message(
        kind="send_recv", axis="near" if same else "far", message_bytes=max(1, size), dtype=dtype
    )
    return price_messages([message], rank.book.pricer, rank.where, rank.book.threads)[0]


def _with_layers(rank: Rank, layers: tuple[PricedLayer, ...]) -> Rank:
    return Rank(
        plan=rank.plan,
        layers=layers,
        model=rank.model,
        book=rank.book,
        where=rank.where,
        contention=rank.contention,
    )


def _stage_times(rank: Rank, chunk: Chunk, send_us: float) -> StageTimes:
    own = _with_layers(rank, chunk.layers)
    forward, backward = Stretch(own), Stretch(own)
    forward.forward()
    backward.backward(later=True, sync=rank.strategy.every_micro)
    weight_us = sum(x.weight_us * n for x, n in chunk.runs)
    return StageTimes(
        forward_us=forward.run().end_us,
        backward_us=backward.run().end_us,
        weight_us=weight_us,
        send_us=send_us,
    )


def _stage(rank: Rank, chunks: Sequence[Chunk], r: int) -> Rank:
    """All layers of a rank, over its virtual stages."""
    layers = tuple(x for c in chunks[r :: rank.plan.pp] for x in c.layers)
    return _with_layers(rank, layers)


def _tails(rank: Rank, stages: Sequence[Rank], optimizer: str) -> list[tuple[Run, float]]:
    """Per stage the last backward with synchronisation and optimizer, and how long it is alone."""
    known: dict[object, tuple[Run, float]] = {}
    found = []
    for i, own in enumerate(stages):
        tied = rank.model.tied_bytes if i in (0, len(stages) - 1) else 0
        key = (tuple(id(x) for x in own.layers), tied)
        if key not in known:
            tail, alone = Stretch(own), Stretch(own)
            tail.backward(later=True, sync=True)
            if tied:
                tail.reduce_tied(tied)
            tail.update(optimizer)
            alone.backward(later=True, sync=rank.strategy.every_micro)
            known[key] = (tail.run(), alone.run().end_us)
        found.append(known[key])
    return found


def _pipeline_outcome(
    rank: Rank,
    chunks: Sequence[Chunk],
    times: Sequence[StageTimes],
    stages: Sequence[Rank],
    tails: Sequence[tuple[Run, float]],
    iteration_us: float,
    slowest: int,
    loads: Sequence[float],
    optimizer: str,
) -> Outcome:
    plan, micro = rank.plan, rank.plan.microbatches
    own, (tail, back_us) = stages[slowest], tails[slowest]
    end, lane_us, comm_us = shares(tail), 0.0, 0.0
    for x in own.layers:
        for work in (x.forward_work, x.later_work):
            lane_us += work.lane_us
            comm_us += work.comm_us
    last_us = sum(x.later_work.lane_us - x.later_work.comm_us for x in own.layers)
    compute_us = micro * (lane_us - comm_us) + max(0.0, end.compute_us - last_us)
    tail_us = tail.end_us - back_us
    hidden = [StageTimes(forward_us=t.forward_us, backward_us=t.backward_us, weight_us=t.weight_us)
              for t in times]  # fmt: skip
    without = max(finish_us(plan.schedule, hidden, plan.pp, micro))
    sends_us = max(0.0, max(finish_us(plan.schedule, times, plan.pp, micro)) - without)
    alike = [hidden[c - c % plan.pp + slowest] for c in range(len(hidden))]
    bubble_us = max(
        0.0, max(finish_us(plan.schedule, alike, plan.pp, micro)) - micro * loads[slowest]
    )
    gathers_us = 0.0
    if rank.strategy.by_layer:
        gathers_us = max(0.0, micro * (loads[slowest] - lane_us))
    tail_exposed_us = max(0.0, tail_us - max(0.0, end.compute_us - last_us))
    exposed_us = micro * comm_us + sends_us + gathers_us + tail_exposed_us
    exposed_us = min(exposed_us, max(0.0, iteration_us - compute_us))
    idle_us = max(0.0, iteration_us - compute_us - exposed_us)
    bubble_us = min(bubble_us, idle_us)
    gap_us = min(idle_us - bubble_us, max(0.0, micro * (loads[slowest] - lane_us) - gathers_us))
    tally = Tally()
    _tally_layers(tally, own.layers, micro)
    tally.add([*tail.sent, *tail.copies, *tail.updates])
    memories = []
    for r in range(plan.pp):
        held = in_flight(plan.schedule, plan.pp, r, micro, plan.virtual)
        kept = sum(
            n * sum(x.saved_bytes * k for x, k in c.runs)
            for n, c in zip(held, chunks[r :: plan.pp], strict=True)
        )
        tied = rank.model.tied_bytes if r == plan.pp - 1 else 0
        memories.append(rank_memory(stages[r].layers, plan, optimizer, kept, tied))
    return Outcome(
        iteration_us=iteration_us,
        compute_us=compute_us,
        exposed_comm_us=exposed_us,
        comm_us=exposed_us + max(0.0, end.comm_us - end.exposed_us),
        host_gap_us=gap_us,
        bubble_us=bubble_us,
        waiting_us=max(0.0, idle_us - bubble_us - gap_us),
        memory=max(memories, key=lambda m: sum(m.values())),
        tally=tally,
        matmul_s=micro * sum(x.matmul_s for x in own.layers),
        tasks=tail.tasks,
        spans=tail.spans,
    )
