"""A plan's iteration: stages simulated, pipelined, synchronised; where its time and memory go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compose.pricing.collectives import Message, price_messages
from compose.pricing.host import python_op
from compose.pricing.layer_prices import PricedLayer
from compose.pricing.price_book import PricedOp
from compose.simulate.breakdown import Shares, Tally, shares
from compose.simulate.cyclic import hand_on, slot_message, steady_us
from compose.simulate.data_parallel import reductions
from compose.simulate.pipeline import StageTimes, finish_us
from compose.simulate.rank import Rank, Run
from compose.simulate.rank_program import RankProgram
from compose.simulate.stage_rank import chunks_of, memory, stages_of
from compose.simulate.stages import Chunk
from compose.simulate.timeline import Span, Task


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


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """The iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    if rank.plan.pp > 1:
        return _pipelined(rank, optimizer)
    return _alone(rank, optimizer)


def _in_turn(rank: Rank, optimizer: str) -> tuple[Run | None, Run]:
    """No pipeline: a micro-batch that is synchronised like the others, if so, and the last one.

    Those before the last one are in its run where nothing of them is sent.
    """
    plan, micro = rank.plan, rank.plan.microbatches
    each = rank.strategy.every_micro or plan.offload == "activations"
    one, final = None, RankProgram(rank)
    if each and micro > 1:
        one = _micro(rank)
    else:
        final.quiet(micro - 1)
    final.forward()
    final.backward(later=micro > 1, sync=True)
    if plan.cdp:
        hand_on(final)
    final.update(optimizer)
    return one, final.run()


def _alone(rank: Rank, optimizer: str) -> Outcome:
    """No pipeline: micro-batches one after the other."""
    plan, micro = rank.plan, rank.plan.microbatches
    one, run = _in_turn(rank, optimizer)
    found, tally = shares(run), Tally()
    if one is not None:
        found = found.plus(shares(one), micro - 1)
        tally.add([*one.sent, *one.copies], micro - 1)
    if plan.cdp:
        found = _cyclic(rank, found)
    _tally_layers(tally, rank.layers, micro)
    tally.add([*run.sent, *run.copies, *run.updates])
    if rank.book.gpu.kind == "cpu" and rank.model.host_us:
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
        memory=memory(rank, optimizer),
        tally=tally,
        matmul_s=micro * sum(x.matmul_s for x in rank.layers),
        tasks=run.tasks,
        spans=run.spans,
    )


def _micro(rank: Rank) -> Run:
    program = RankProgram(rank)
    program.forward()
    program.backward(later=True, sync=True)
    return program.run()


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
    (op,) = price_messages([message], rank.book, rank.where)
    n = rank.plan.dp
    end_us = steady_us(alone.end_us, op.duration_us, n, rank.contention, op.latency_us)
    comm_us, copied_us = 2 * n * op.duration_us, 2 * n * (op.duration_us - op.latency_us)
    slowed_us = alone.compute_us + (rank.contention - 1) * min(alone.end_us, copied_us)
    slowed_us = min(end_us, slowed_us)
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """A plan's stages with their times; ``tails`` by rank: last backward to the end, and alone."""

    rank: Rank
    optimizer: str
    chunks: Sequence[Chunk]
    times: Sequence[StageTimes]
    stages: Sequence[Rank]
    tails: Sequence[tuple[Run, float]]

    def finish_us(self, times: Sequence[StageTimes]) -> tuple[float, ...]:
        """When each rank's last backward is done."""
        plan = self.rank.plan
        return finish_us(plan.schedule, times, plan.pp, plan.microbatches)

    def totals_us(self) -> list[float]:
        """When each rank is done."""
        ends = self.finish_us(self.times)
        return [e + tail.end_us - us for e, (tail, us) in zip(ends, self.tails, strict=True)]

    def loads_us(self) -> list[float]:
        """Time of each rank's forward and backward of one micro-batch."""
        pp = self.rank.plan.pp
        return [sum(t.forward_us + t.backward_us for t in self.times[r::pp]) for r in range(pp)]


def _pipeline(rank: Rank, optimizer: str) -> _Pipeline:
    chunks, stages = chunks_of(rank), stages_of(rank)
    times, facts = [], _facts(rank)
    for i, chunk in enumerate(chunks):
        send = _send(rank, chunk, i, len(chunks))
        key = ("stage", chunk.key, send.duration_us, facts)
        if key not in rank.model.memo:
            rank.model.memo[key] = _stage_times(rank, chunk, send.duration_us)
        times.append(rank.model.memo[key])
    tails = _tails(rank, stages, optimizer)
    return _Pipeline(
        rank=rank, optimizer=optimizer, chunks=chunks, times=times, stages=stages, tails=tails
    )


def _facts(rank: Rank) -> tuple[object, ...]:
    """What of a plan changes a stage's run, beside its layers."""
    plan, groups = rank.plan, rank.where.groups
    facts = (plan.compress, plan.offload, plan.ep, rank.contention, rank.crowd, rank.where.node)
    return (rank.strategy, groups["shard"], groups["expert"], *facts)


def quick_us(rank: Rank, optimizer: str) -> float:
    """The iteration ``evaluate`` finds, without its breakdown."""
    if rank.plan.pp == 1:
        one, run = _in_turn(rank, optimizer)
        if rank.plan.cdp:
            return _cyclic(rank, shares(run)).end_us
        return run.end_us + (one.end_us * (rank.plan.microbatches - 1) if one else 0.0)
    return max(_pipeline(rank, optimizer).totals_us())


def _send(rank: Rank, chunk: Chunk, i: int, count: int) -> PricedOp:
    """A message over the boundary after chunk i."""
    per_node = rank.where.groups["pp"].per_node
    same = per_node > 1 and (i % rank.plan.pp + 1) % per_node != 0
    dtype = next((p.dtype for x, _ in chunk.runs for p in x.layer.parameters), "fp32")
    size = chunk.output_bytes if i + 1 < count else 0
    message = Message(
        kind="send_recv", axis="near" if same else "far", message_bytes=max(1, size), dtype=dtype
    )
    return price_messages([message], rank.book, rank.where)[0]


def _stage_times(rank: Rank, chunk: Chunk, send_us: float) -> StageTimes:
    own = replace(rank, layers=chunk.layers)
    forward, backward = RankProgram(own), RankProgram(own)
    half = python_op("pipeline_micro", 1, rank.book, 0.5)
    for program in (forward, backward):
        program.lanes.work(chunk.layers[0].fold([half]), "schedule")
    forward.forward()
    backward.backward(later=True, sync=rank.strategy.every_micro)
    weight_us = sum(x.weight_us * n for x, n in chunk.runs)
    return StageTimes(
        forward_us=forward.run().end_us,
        backward_us=backward.run().end_us,
        weight_us=weight_us,
        send_us=send_us,
    )


def _tails(rank: Rank, stages: Sequence[Rank], optimizer: str) -> list[tuple[Run, float]]:
    """Per stage the last backward with synchronisation and optimizer, and how long it is alone."""
    memo, facts = rank.model.memo, _facts(rank)
    ends = (0, len(stages) - 1)
    ties = [rank.model.frame.tied_bytes if i in ends else 0 for i in range(len(stages))]
    keys = [
        ("tail", tuple(map(id, own.layers)), tied, optimizer, facts)
        for own, tied in zip(stages, ties, strict=True)
    ]
    fresh = {key: own for key, own in zip(keys, stages, strict=True) if key not in memo}
    asked = [m for own in fresh.values() for m in reductions(own.layers, own.plan)]
    price_messages(asked, rank.book, rank.where)  # one question for all of them
    for own, tied, key in zip(stages, ties, keys, strict=True):
        if key not in memo:
            tail, alone = RankProgram(own), RankProgram(own)
            tail.backward(later=True, sync=True)
            if tied:
                tail.reduce_tied(tied)
            tail.update(optimizer)
            alone.backward(later=True, sync=rank.strategy.every_micro)
            memo[key] = (tail.run(), alone.run().end_us)
    return [memo[key] for key in keys]


def _pipelined(rank: Rank, optimizer: str) -> Outcome:
    """The slowest rank's time: what its ops take, what it waits for, and why."""
    found = _pipeline(rank, optimizer)
    micro, pp = rank.plan.microbatches, rank.plan.pp
    totals, loads = found.totals_us(), found.loads_us()
    iteration_us = max(totals)
    slowest = max(range(pp), key=lambda r: (loads[r], totals[r]))
    own, (tail, back_us) = found.stages[slowest], found.tails[slowest]
    end = shares(tail)
    works = [w for x in own.layers for w in (x.forward_work, x.later_work)]
    lane_us, comm_us = sum(w.lane_us for w in works), sum(w.comm_us for w in works)
    last_us = sum(x.later_work.lane_us - x.later_work.comm_us for x in own.layers)
    update_us = max(0.0, end.compute_us - last_us)  # optimizer and copies
    compute_us = micro * (lane_us - comm_us) + update_us
    unsent = [replace(t, send_us=0.0) for t in found.times]
    sends_us = max(0.0, max(found.finish_us(found.times)) - max(found.finish_us(unsent)))
    alike = [unsent[c - c % pp + slowest] for c in range(len(unsent))]
    bubble_us = max(0.0, max(found.finish_us(alike)) - micro * loads[slowest])
    gaps_us = max(0.0, micro * (loads[slowest] - lane_us))
    gathers_us = gaps_us if rank.strategy.by_layer else 0.0
    exposed_us = micro * comm_us + sends_us + gathers_us
    exposed_us += max(0.0, tail.end_us - back_us - update_us)
    exposed_us = min(exposed_us, max(0.0, iteration_us - compute_us))
    idle_us = max(0.0, iteration_us - compute_us - exposed_us)
    gaps_us = min(idle_us, gaps_us - gathers_us)
    bubble_us = min(bubble_us, idle_us - gaps_us)
    tally = Tally()
    _tally_layers(tally, own.layers, micro)
    tally.add([*tail.sent, *tail.copies, *tail.updates])
    return Outcome(
        iteration_us=iteration_us,
        compute_us=compute_us,
        exposed_comm_us=exposed_us,
        comm_us=exposed_us + max(0.0, end.comm_us - end.exposed_us),
        host_gap_us=gaps_us,
        bubble_us=bubble_us,
        waiting_us=max(0.0, idle_us - bubble_us - gaps_us),
        memory=memory(rank, optimizer),
        tally=tally,
        matmul_s=micro * sum(x.matmul_s for x in own.layers),
        tasks=tail.tasks,
        spans=tail.spans,
    )
