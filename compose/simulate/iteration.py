"""Simulates an iteration under a plan: its time, its memory, and what each is spent on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from itercast.capture.plan import ParallelPlan
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.pricing.collectives import price_messages
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.simulate.breakdown import Outcome, Shares, Tally, broken_down, shares
from itercast.compose.simulate.cyclic import send_to_next_replica, slot_message, steady_us
from itercast.compose.simulate.pipeline import (
    StageTimes,
    chunks_of_rank,
    finish_us,
    rank_of_chunk,
)
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stage_rank import (
    StageRuns,
    chunks_of,
    memory,
    stage_facts,
    stage_memory,
    stage_messages,
    stage_runs,
    stage_tails,
    stages_of,
)
from itercast.compose.simulate.stages import Chunk

T = TypeVar("T")


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """Simulate the iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    if rank.plan.pp > 1:
        return evaluate_stages([rank] * rank.plan.pp, optimizer)
    return outcome(rank, *micro_batches(rank, optimizer), optimizer)


def micro_batches(rank: Rank, optimizer: str) -> tuple[list[tuple[Run, int]], Run]:
    """Lays out the micro-batches of a rank without a pipeline, one after the other.

    Returns the micro-batches before the last as pairs (run, how often it is repeated), and the run
    of the last one, which synchronises gradients and ends with the optimizer. Micro-batches that
    send nothing are not listed: they are part of the last run. Training steps follow each other:
    where the host waits for no op nor for the step's end, it launches the next one meanwhile.
    """
    micro = rank.plan.microbatches
    every = rank.strategy.every_micro
    waits = any(w.stall_us > 0 for x in rank.layers for w in (x.forward_work, x.backward_work))
    ahead = optimizer != "none" and not waits and not rank.synchronised
    before, final = list[tuple[Run, int]](), RankProgram(rank, ahead=ahead)
    if micro > 1 and (every or rank.strategy.offload == "activations"):
        before = [(_one_micro_batch(rank, ahead, later=every), micro - 1 if every else 1)]
        if micro > 2 and not every:
            before.append((_one_micro_batch(rank, ahead, later=True), micro - 2))
    else:
        final.unsynchronised(micro - 1)
    final.forward()
    final.backward(later=micro > 1, sync=True)
    if rank.strategy.cyclic:
        send_to_next_replica(final)
    final.update(optimizer)
    return before, final.run()


def outcome(rank: Rank, before: Sequence[tuple[Run, int]], run: Run, optimizer: str) -> Outcome:
    """What a rank's micro-batches ``before`` the last one and its last run amount to."""
    plan, micro = rank.plan, rank.plan.microbatches
    lanes, tally = shares(run), Tally(rank.book.gpu.kind == "cpu")
    for one, times in before:
        lanes = lanes.plus(shares(one), times)
        _tally_run(tally, one, times)
    if rank.strategy.cyclic:
        message = _slot_message(rank)
        lanes = _cyclic(rank, lanes, message)
        tally.comm.add(2 * plan.dp * message.duration_us, message.assumed)
    _tally_layers(tally, rank.layers, micro, _accumulations(rank))
    _tally_run(tally, run)
    tally.add([rank.model.host], micro)
    return broken_down(
        lanes,
        tally,
        memory=memory(rank, optimizer),
        matmul_s=micro * sum(x.matmul_s for x in rank.layers),
        tasks=run.tasks,
        spans=run.spans,
    )


def _one_micro_batch(rank: Rank, ahead: bool, *, later: bool) -> Run:
    """A micro-batch before the last one; ``later``: not the step's first."""
    program = RankProgram(rank, ahead=ahead)
    program.forward(last=False)
    program.backward(later=later, sync=rank.strategy.every_micro)
    return program.run()


def _accumulations(rank: Rank) -> int:
    """Counts how often layers add their gradients to those of earlier micro-batches.

    0 where gradient shards are added instead, and where gradients are copied into buckets.
    """
    if rank.strategy.every_micro:
        return 0
    how = rank.strategy
    return max(0, rank.plan.microbatches - 1 - (bool(how.reduce) and not how.early))


def _tally_run(tally: Tally, run: Run, times: int = 1) -> None:
    tally.add([*run.sent, *run.copies, *run.updates], times)


def _tally_layers(
    tally: Tally, layers: Sequence[PricedLayer], micro: int, accumulations: int
) -> None:
    counted: dict[int, tuple[PricedLayer, int]] = {}
    for x in layers:
        counted[id(x)] = (x, counted.get(id(x), (x, 0))[1] + 1)
    for x, n in counted.values():
        tally.add([*x.forward, *x.backward], n * micro)
        tally.add(x.trained_only(x.accumulate), n * accumulations)


def _slot_message(rank: Rank) -> PricedOp:
    """The message of a slot of cyclic data parallelism."""
    nbytes = sum(x.layer.trained_bytes for x in rank.layers)
    dtype = next((p.dtype for x in rank.layers for p in x.layer.parameters), "fp32")
    return price_messages([slot_message(nbytes, rank.plan.dp, dtype)], rank.book, rank.where)[0]


def _cyclic(rank: Rank, alone: Shares, op: PricedOp) -> Shares:
    """Times of a step of cyclic data parallelism, from those of a replica ``alone``.

    A step has 2 dp slots of time; in each a message ``op`` runs beside the slot's compute.
    """
    n = rank.plan.dp
    end_us = steady_us(alone.end_us, op.duration_us, n, rank.contention, op.latency_us)
    comm_us, copied_us = 2 * n * op.duration_us, 2 * n * (op.duration_us - op.latency_us)
    slowed_us = alone.compute_us + (rank.contention - 1) * min(alone.end_us, copied_us)
    slowed_us = min(end_us, slowed_us)
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A plan's stages with their times.

    ``ranks`` by stage: all layers, priced on the stage's device. ``tails`` by rank: the run from
    its last backward to the end of the iteration, and that backward without synchronisation and
    optimizer. ``sends``: the messages after each chunk.
    """

    ranks: Sequence[Rank]
    chunks: Sequence[Chunk]
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
        return chunks_of_rank(plan.schedule, plan.pp, r, len(self.chunks))

    def shares_of(self, r: int) -> Shares:
        """A rank's time on its lanes: all micro-batches, synchronisation and optimizer."""
        micro = self.plan.microbatches
        tail, alone = self.tails[r]
        lanes = shares(tail).plus(shares(alone), -1)
        for x in (self.runs[c] for c in self.chunks_of(r)):
            lanes = lanes.plus(shares(x.forward), micro).plus(shares(x.backward), micro)
            lanes = lanes.plus(Shares(x.accumulate_us, x.accumulate_us, 0.0, 0.0), -1)
        return lanes

    def schedule_us(self, slowest: int) -> tuple[float, float]:
        """Time that messages between stages add, and the bubble if all stages were the slowest."""
        unsent = [replace(t, send_us=0.0) for t in self.times]
        sends_us = max(0.0, max(self.finish_us(self.times)) - max(self.finish_us(unsent)))
        own = self.chunks_of(slowest)
        equal = [unsent[own[c // self.plan.pp]] for c in range(len(unsent))]
        bubble_us = max(0.0, max(self.finish_us(equal)) - self.loads_us()[slowest])
        return sends_us, bubble_us


def _each(ranks: Sequence[Rank], of: Callable[[Rank], Sequence[T]]) -> list[T]:
    """Of each rank its own one of what ``of`` lists for all; once for ranks that are the same."""
    found = {id(rank): of(rank) for rank in {id(r): r for r in ranks}.values()}
    return [found[id(rank)][i] for i, rank in enumerate(ranks)]


def pipeline_of(ranks: Sequence[Rank], optimizer: str) -> Pipeline:
    plan = ranks[0].plan
    pieces = range(plan.pp * plan.virtual)
    owners = [ranks[rank_of_chunk(plan.schedule, plan.pp, c)] for c in pieces]
    chunks, sends = _each(owners, chunks_of), [*_each(owners[:-1], stage_messages), ()]
    runs = [
        x.model.once(("stage runs", chunk.key, stage_facts(x)), partial(stage_runs, x, chunk))
        for x, chunk in zip(owners, chunks, strict=True)
    ]
    return Pipeline(
        ranks=ranks,
        chunks=chunks,
        sends=sends,
        runs=runs,
        times=[x.times(sent) for x, sent in zip(runs, sends, strict=True)],
        stages=_each(ranks, stages_of),
        tails=_each(ranks, lambda r: stage_tails(r, stages_of(r), optimizer)),
    )


def quick_us(rank: Rank, optimizer: str) -> float:
    """Time of the iteration as ``evaluate`` simulates it, without its breakdown."""
    if rank.plan.pp == 1:
        before, run = micro_batches(rank, optimizer)
        if rank.strategy.cyclic:
            return _cyclic(rank, shares(run), _slot_message(rank)).end_us
        return run.end_us + sum(one.end_us * times for one, times in before)
    return max(pipeline_of([rank] * rank.plan.pp, optimizer).totals_us())


def evaluate_stages(ranks: Sequence[Rank], optimizer: str) -> Outcome:
    """The iteration of a pipeline, broken down on its slowest rank.

    Of each stage the rank that holds all layers, priced on the stage's device.
    """
    pipeline = pipeline_of(ranks, optimizer)
    micro, pp = pipeline.plan.microbatches, pipeline.plan.pp
    totals, loads = pipeline.totals_us(), pipeline.loads_us()
    iteration_us = max(totals)
    slowest = max(range(pp), key=lambda r: (loads[r], totals[r]))
    stage, (tail, _) = pipeline.stages[slowest], pipeline.tails[slowest]
    lanes = pipeline.shares_of(slowest)
    sends_us, bubble_us = pipeline.schedule_us(slowest)
    exposed_us = min(lanes.exposed_us + sends_us, max(0.0, iteration_us - lanes.compute_us))
    comm_us = exposed_us + max(0.0, lanes.comm_us - lanes.exposed_us)
    by_stage = _each(ranks, lambda r: stage_memory(r, optimizer))
    least_left = fullest(ranks, by_stage)
    return broken_down(
        Shares(iteration_us, lanes.compute_us, exposed_us, comm_us),
        _stage_tally(pipeline, slowest),
        memory=by_stage[least_left],
        matmul_s=micro * sum(x.matmul_s for x in stage.layers),
        tasks=tail.tasks,
        spans=tail.spans,
        host_gap_us=max(0.0, lanes.end_us - lanes.compute_us - lanes.exposed_us),
        bubble_us=bubble_us,
        slowest=slowest,
        fullest=least_left,
    )


def fullest(ranks: Sequence[Rank], memories: Sequence[Mapping[str, int]]) -> int:
    """The number of the rank whose memory has least left."""
    pairs = zip(ranks, memories, strict=True)
    left = [room_bytes(r.book.gpu, r.plan) - sum(m.values()) for r, m in pairs]
    return left.index(min(left))


def _stage_tally(pipeline: Pipeline, stage: int) -> Tally:
    """Sum up the time of one pipeline rank: layers, messages, host, synchronisation, optimizer.

    The model's own host time is divided equally among the stages; it is not part of the times by op
    family.
    """
    rank, micro, pp = pipeline.ranks[stage], pipeline.plan.microbatches, pipeline.plan.pp
    tally, (tail, alone) = Tally(rank.book.gpu.kind == "cpu"), pipeline.tails[stage]
    _tally_layers(tally, pipeline.stages[stage].layers, micro, _accumulations(rank))
    _tally_run(tally, tail)
    _tally_run(tally, alone, -1)
    for chunk in pipeline.chunks_of(stage):
        _tally_run(tally, pipeline.runs[chunk].forward, micro)
        _tally_run(tally, pipeline.runs[chunk].backward, micro)
        for boundary in (chunk - 1, chunk):
            if 0 <= boundary < len(pipeline.chunks) - 1:
                ways = 1 if pipeline.runs[boundary].detached else 2  # forth and back
                tally.add(pipeline.sends[boundary], ways * micro)
        schedule = python_op("pipeline_micro", 1, rank.book)
        tally.host.add(micro * schedule.duration_us, schedule.assumed)
    host = rank.model.host
    tally.host.add(micro * host.duration_us / pp, host.assumed)
    return tally
