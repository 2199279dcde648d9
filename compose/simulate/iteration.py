"""Simulates an iteration under a plan: its time, its memory, and what each is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from compose.pricing.collectives import Message, price_messages
from compose.pricing.host import python_op
from compose.pricing.layer_prices import PricedLayer
from compose.pricing.price_book import PricedOp
from compose.simulate.breakdown import Shares, Tally, assumed_us, shares
from compose.simulate.cyclic import send_to_next_replica, slot_message, steady_us
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

    idle = host gaps + pipeline bubble + waiting for slower stages. ``matmul_s``: the rank's matrix
    products at peak. ``assumed_by_us``: what of the iteration rests on each assumption (see
    ``Forecast``). ``tasks`` show the last micro-batch and the optimizer.
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
    assumed_by_us: dict[str, float]
    matmul_s: float
    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]

    @property
    def idle_us(self) -> float:
        """Time in which the compute lane neither computes nor waits for a message."""
        return max(0.0, self.iteration_us - self.compute_us - self.exposed_comm_us)

    @property
    def memory_bytes(self) -> int:
        """Peak of the fullest rank."""
        return sum(self.memory.values())


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """Simulate the iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    if rank.plan.pp > 1:
        return _pipelined(rank, optimizer)
    return _without_pipeline(rank, optimizer)


def _micro_batches(rank: Rank, optimizer: str) -> tuple[Run | None, Run]:
    """Runs of the micro-batches without a pipeline: of each one before the last, and of the last.

    The first is None where those before send nothing: then they are part of the last one's run.
    """
    plan, micro = rank.plan, rank.plan.microbatches
    each = rank.strategy.every_micro or plan.offload == "activations"
    one, final = None, RankProgram(rank)
    if each and micro > 1:
        one = _one_micro_batch(rank)
    else:
        final.unsynchronised(micro - 1)
    final.forward()
    final.backward(later=micro > 1, sync=True)
    if plan.cdp:
        send_to_next_replica(final)
    final.update(optimizer)
    return one, final.run()


def _without_pipeline(rank: Rank, optimizer: str) -> Outcome:
    """The iteration of one stage: micro-batches one after the other."""
    plan, micro = rank.plan, rank.plan.microbatches
    one, run = _micro_batches(rank, optimizer)
    found, tally = shares(run), Tally()
    if one is not None:
        found = found.plus(shares(one), micro - 1)
        tally.add_sent(one.sent, micro - 1)
        tally.add(one.copies, micro - 1)
    if plan.cdp:
        message = _slot_message(rank)
        found = _cyclic(rank, found, message)
        tally.comm.add(2 * plan.dp * message.duration_us, message.assumed)
    _tally_layers(tally, rank.layers, micro)
    tally.add_sent(run.sent)
    tally.add([*run.copies, *run.updates])
    on_cpu = rank.book.gpu.kind == "cpu"
    tally.add_host(rank.model.host_us * micro, rank.model.host_assumed, in_compute=on_cpu)
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
        assumed_by_us=assumed_us(tally, found.compute_us, found.exposed_us, idle_us, on_cpu=on_cpu),
        matmul_s=micro * sum(x.matmul_s for x in rank.layers),
        tasks=run.tasks,
        spans=run.spans,
    )


def _one_micro_batch(rank: Rank) -> Run:
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


def _slot_message(rank: Rank) -> PricedOp:
    """The message of a slot of cyclic data parallelism."""
    nbytes = sum(x.layer.trained_bytes for x in rank.layers)
    dtype = next((p.dtype for x in rank.layers for p in x.layer.parameters), "fp32")
    return price_messages([slot_message(nbytes, rank.plan.dp, dtype)], rank.book, rank.where)[0]


def _cyclic(rank: Rank, alone: Shares, op: PricedOp) -> Shares:
    """A step of cyclic data parallelism: each slot's message ``op`` overlaps its compute."""
    n = rank.plan.dp
    end_us = steady_us(alone.end_us, op.duration_us, n, rank.contention, op.latency_us)
    comm_us, copied_us = 2 * n * op.duration_us, 2 * n * (op.duration_us - op.latency_us)
    slowed_us = alone.compute_us + (rank.contention - 1) * min(alone.end_us, copied_us)
    slowed_us = min(end_us, slowed_us)
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """A plan's stages with their times.

    ``tails`` by rank: the run from its last backward to the end of the iteration, and the time of
    that backward without synchronisation and optimizer. ``sends``: the message after each chunk.
    """

    rank: Rank
    optimizer: str
    chunks: Sequence[Chunk]
    sends: Sequence[PricedOp]
    times: Sequence[StageTimes]
    stages: Sequence[Rank]
    tails: Sequence[tuple[Run, float]]

    def finish_us(self, times: Sequence[StageTimes]) -> tuple[float, ...]:
        """When each rank's last backward ends."""
        plan = self.rank.plan
        return finish_us(plan.schedule, times, plan.pp, plan.microbatches)

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        ends = self.finish_us(self.times)
        return [e + tail.end_us - us for e, (tail, us) in zip(ends, self.tails, strict=True)]

    def loads_us(self) -> list[float]:
        """Time of each rank's forward and backward of one micro-batch."""
        pp = self.rank.plan.pp
        return [sum(t.forward_us + t.backward_us for t in self.times[r::pp]) for r in range(pp)]

    def schedule_us(self, slowest: int) -> tuple[float, float]:
        """Time that messages between stages add, and the bubble if all stages were the slowest."""
        pp, micro = self.rank.plan.pp, self.rank.plan.microbatches
        unsent = [replace(t, send_us=0.0) for t in self.times]
        sends_us = max(0.0, max(self.finish_us(self.times)) - max(self.finish_us(unsent)))
        equal = [unsent[c - c % pp + slowest] for c in range(len(unsent))]
        bubble_us = max(0.0, max(self.finish_us(equal)) - micro * self.loads_us()[slowest])
        return sends_us, bubble_us


def _pipeline(rank: Rank, optimizer: str) -> _Pipeline:
    chunks, stages, facts = chunks_of(rank), stages_of(rank), _facts(rank)
    sends = [_send(rank, chunk, i, len(chunks)) for i, chunk in enumerate(chunks)]
    times = [
        rank.model.once(
            ("stage times", chunk.key, send.duration_us, facts),
            partial(_stage_times, rank, chunk, send.duration_us),
        )
        for chunk, send in zip(chunks, sends, strict=True)
    ]
    return _Pipeline(
        rank=rank,
        optimizer=optimizer,
        chunks=chunks,
        sends=sends,
        times=times,
        stages=stages,
        tails=_tails(rank, stages, optimizer),
    )


def _facts(rank: Rank) -> tuple[object, ...]:
    """The parts of a plan that change a stage's run, apart from its layers."""
    plan, groups = rank.plan, rank.where.groups
    facts = (
        plan.compress,
        plan.offload,
        plan.ep,
        rank.contention,
        rank.ranks_per_core,
        rank.where.node,
    )
    return (rank.strategy, groups["shard"], groups["expert"], *facts)


def quick_us(rank: Rank, optimizer: str) -> float:
    """Time of the iteration as ``evaluate`` simulates it, without its breakdown."""
    if rank.plan.pp == 1:
        one, run = _micro_batches(rank, optimizer)
        if rank.plan.cdp:
            return _cyclic(rank, shares(run), _slot_message(rank)).end_us
        return run.end_us + (one.end_us * (rank.plan.microbatches - 1) if one else 0.0)
    return max(_pipeline(rank, optimizer).totals_us())


def _send(rank: Rank, chunk: Chunk, i: int, count: int) -> PricedOp:
    """The message over the boundary after chunk ``i``."""
    per_node = rank.where.groups["pp"].per_node
    same = per_node > 1 and (i % rank.plan.pp + 1) % per_node != 0
    dtype = next((p.dtype for x, _ in chunk.runs for p in x.layer.parameters), "fp32")
    size = chunk.output_bytes if i + 1 < count else 0
    axis = "intra_node" if same else "inter_node"
    message = Message(kind="send_recv", axis=axis, message_bytes=max(1, size), dtype=dtype)
    return price_messages([message], rank.book, rank.where)[0]


def _stage_times(rank: Rank, chunk: Chunk, send_us: float) -> StageTimes:
    stage = replace(rank, layers=chunk.layers)
    forward, backward = RankProgram(stage), RankProgram(stage)
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
    """By stage the run of ``_tail``; stages with the same layers share it."""
    facts, last = _facts(rank), len(stages) - 1
    ties = [rank.model.graph.tied_bytes if i in (0, last) else 0 for i in range(len(stages))]
    keys = [
        ("tail", tuple(map(id, stage.layers)), tied, optimizer, facts)
        for stage, tied in zip(stages, ties, strict=True)
    ]
    fresh = [x for x, key in zip(stages, keys, strict=True) if key not in rank.model.results]
    messages = [m for stage in fresh for m in reductions(stage.layers, stage.plan)]
    price_messages(messages, rank.book, rank.where)  # one call of the pricer for all of them
    return [
        rank.model.once(key, partial(_tail, stage, tied, optimizer))
        for stage, tied, key in zip(stages, ties, keys, strict=True)
    ]


def _tail(stage: Rank, tied_bytes: int, optimizer: str) -> tuple[Run, float]:
    """A stage's last backward with synchronisation and optimizer; the backward's time alone."""
    tail, alone = RankProgram(stage), RankProgram(stage)
    tail.backward(later=True, sync=True)
    if tied_bytes:
        tail.reduce_tied(tied_bytes)
    tail.update(optimizer)
    alone.backward(later=True, sync=stage.strategy.every_micro)
    return tail.run(), alone.run().end_us


def _pipelined(rank: Rank, optimizer: str) -> Outcome:
    """The iteration of a pipeline, broken down on its slowest rank."""
    found = _pipeline(rank, optimizer)
    micro, pp = rank.plan.microbatches, rank.plan.pp
    totals, loads = found.totals_us(), found.loads_us()
    iteration_us = max(totals)
    slowest = max(range(pp), key=lambda r: (loads[r], totals[r]))
    stage, (tail, back_us) = found.stages[slowest], found.tails[slowest]
    end = shares(tail)
    works = [w for x in stage.layers for w in (x.forward_work, x.later_work)]
    lane_us, comm_us = sum(w.lane_us for w in works), sum(w.comm_us for w in works)
    last_us = sum(x.later_work.lane_us - x.later_work.comm_us for x in stage.layers)
    update_us = max(0.0, end.compute_us - last_us)  # optimizer and copies
    compute_us = micro * (lane_us - comm_us) + update_us
    sends_us, bubble_us = found.schedule_us(slowest)
    gaps_us = max(0.0, micro * (loads[slowest] - lane_us))
    gathers_us = gaps_us if rank.strategy.by_layer else 0.0
    exposed_us = micro * comm_us + sends_us + gathers_us
    exposed_us += max(0.0, tail.end_us - back_us - update_us)
    exposed_us = min(exposed_us, max(0.0, iteration_us - compute_us))
    idle_us = max(0.0, iteration_us - compute_us - exposed_us)
    gaps_us = min(idle_us, gaps_us - gathers_us)
    bubble_us = min(bubble_us, idle_us - gaps_us)
    tally = _stage_tally(found, slowest)
    on_cpu = rank.book.gpu.kind == "cpu"
    assumed_by_us = assumed_us(tally, compute_us, exposed_us, gaps_us, on_cpu=on_cpu)
    scale = iteration_us / max(1e-9, compute_us + exposed_us + gaps_us)  # bubble and waiting alike
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
        assumed_by_us={name: scale * us for name, us in assumed_by_us.items()},
        matmul_s=micro * sum(x.matmul_s for x in stage.layers),
        tasks=tail.tasks,
        spans=tail.spans,
    )


def _stage_tally(found: _Pipeline, stage: int) -> Tally:
    """Time of one rank of the pipeline: its layers, its tail, its messages and its host.

    The model's host time is spread evenly over the stages; by family it counts on no stage.
    """
    rank, micro, pp = found.rank, found.rank.plan.microbatches, found.rank.plan.pp
    tally, (tail, _) = Tally(), found.tails[stage]
    _tally_layers(tally, found.stages[stage].layers, micro)
    tally.add_sent(tail.sent)
    tally.add([*tail.copies, *tail.updates])
    for chunk in range(stage, len(found.chunks), pp):
        for boundary in (chunk - 1, chunk):
            if 0 <= boundary < len(found.chunks) - 1:
                message = found.sends[boundary]
                tally.comm.add(micro * message.duration_us, message.assumed)
        schedule = python_op("pipeline_micro", 1, rank.book)
        tally.host.add(micro * schedule.duration_us, schedule.assumed)
    tally.host.add(micro * rank.model.host_us / pp, rank.model.host_assumed)
    return tally
