"""Simulates an iteration under a plan: its time, its memory, and what each is spent on.

Ranks that do the same are simulated once. What the others do are several lists of runs: one of each
stage of a pipeline (``stage_rank``), or one of each kind of replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.simulate.breakdown import (
    Outcome,
    Shares,
    Tally,
    added_up,
    broken_down,
    tally_layers,
)
from itercast.compose.simulate.cyclic import send_to_next_replica, slots_of, staggered
from itercast.compose.simulate.memory_plan import stage_memory
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stage_rank import Pipeline, by_rank, pipeline_of
from itercast.compose.simulate.timeline import side_by_side

Runs = list[tuple[Run, int]]  # in order, each with how often it is repeated


def evaluate(rank: Rank, optimizer: str) -> Outcome:
    """Simulate the iteration of ``rank``'s plan; its ``layers`` are those of the whole model."""
    return evaluate_ranks([rank] * rank.plan.pp, optimizer)


def quick_us(rank: Rank, optimizer: str) -> float:
    """Time of the iteration as ``evaluate`` simulates it, without its breakdown."""
    return max(_simulated([rank] * rank.plan.pp, optimizer).totals_us())


def evaluate_ranks(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Outcome:
    """The iteration of ranks of unlike work or devices, broken down on the slowest of them.

    ``ranks``: of each stage one with all layers, priced on the stage's device; without a pipeline
    one of each kind of replica, with its own micro-batch. ``crowding``: see ``side_by_side``.
    """
    found, plan = _simulated(ranks, optimizer, crowding), ranks[0].plan
    totals, loads = found.totals_us(), found.loads_us()
    slowest = max(range(len(ranks)), key=lambda r: (loads[r], totals[r]))
    lanes, runs = found.lanes_of(slowest), found.runs_of(slowest)
    sends_us, bubble_us = found.schedule_us(slowest)
    exposed_us = min(lanes.exposed_us + sends_us, max(0.0, max(totals) - lanes.compute_us))
    comm_us = exposed_us + max(0.0, lanes.comm_us - lanes.exposed_us)
    memories = by_rank(ranks, lambda r: stage_memory(r, optimizer))
    least_left = fullest(ranks, memories)
    layers, tally = found.stages[slowest].layers, Tally(ranks[slowest].book.gpu.kind == "cpu")
    tally_layers(tally, layers, plan.microbatches, _accumulations(ranks[slowest]))
    for run, n in runs:
        tally.add(run.added, n)
    for op, times in found.others_of(slowest):
        tally.add([op], times)
    return broken_down(
        Shares(max(totals), lanes.compute_us, exposed_us, comm_us),
        tally,
        runs[-1][0],
        memory=memories[least_left],
        matmul_s=plan.microbatches * _mean_matmul_s(found.stages),
        host_gap_us=_gaps_us(found, slowest, lanes),
        bubble_us=bubble_us,
        slowest=slowest,
        fullest=least_left,
    )


def _mean_matmul_s(ranks: Sequence[Rank]) -> float:
    """Matrix products of a micro-batch at peak, in seconds: the mean over all ranks of the job."""
    alike = [rank.kin or 1 for rank in ranks]
    sums_s = (n * sum(x.matmul_s for x in r.layers) for n, r in zip(alike, ranks, strict=True))
    return sum(sums_s) / sum(alike)


def _gaps_us(found: Pipeline | _Replicas, r: int, lanes: Shares) -> float:
    """Idle time of a rank that is there without the others, too: its host launches."""
    if isinstance(found, _Replicas) and len(found.stages) > 1:
        return min(lanes.idle_us, added_up(found.unshared[r]).idle_us)
    return lanes.idle_us


def _simulated(
    ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0
) -> Pipeline | _Replicas:
    if ranks[0].plan.pp > 1:
        return pipeline_of(ranks, optimizer)
    alone = [micro_batches(rank, optimizer) for rank in ranks]
    laid = [[*before, (last, 1)] for before, last in alone]
    return _Replicas(stages=ranks, unshared=laid, runs=_together(ranks, laid, crowding))


def micro_batches(rank: Rank, optimizer: str) -> tuple[Runs, Run]:
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
    before, final = Runs(), RankProgram(rank, ahead=ahead)
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


def _one_micro_batch(rank: Rank, ahead: bool, *, later: bool) -> Run:
    """A micro-batch before the last one; ``later``: not the step's first."""
    program = RankProgram(rank, ahead=ahead)
    program.forward(last=False)
    program.backward(later=later, sync=rank.strategy.every_micro)
    return program.run()


def _together(ranks: Sequence[Rank], laid: Sequence[Runs], crowding: float) -> Sequence[Runs]:
    """The runs of ranks with the times of a simulation of all of them."""
    if len(ranks) == 1:
        return laid
    factors, joint = [rank.contention for rank in ranks], [Runs() for _ in ranks]
    for turn in zip(*laid, strict=True):
        sent = {sum(task.once is not None for task in run.tasks) for run, _ in turn}
        if len(sent) > 1:
            told = ", ".join(map(str, sorted(sent)))
            raise ValueError(f"ranks of one job send equally many messages, these {told}")
        spans = side_by_side([run.tasks for run, _ in turn], factors, crowding)
        for own, (run, times), times_us in zip(joint, turn, spans, strict=True):
            own.append((replace(run, spans=times_us), times))
    return joint


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    """Ranks without a pipeline, one of each kind: what each runs beside the others, and alone."""

    stages: Sequence[Rank]
    runs: Sequence[Runs]
    unshared: Sequence[Runs]

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        if self.stages[0].strategy.cyclic:
            return [self.lanes_of(r).end_us for r in range(len(self.stages))]
        return [sum(times * run.end_us for run, times in own) for own in self.runs]

    def loads_us(self) -> list[float]:
        """Time that each rank computes."""
        one = len(self.stages) == 1
        return [0.0 if one else added_up(own).compute_us for own in self.runs]

    def runs_of(self, r: int) -> Runs:
        """All that a rank runs; the last one ends the step."""
        return self.runs[r]

    def lanes_of(self, r: int) -> Shares:
        """A rank's time on its lanes."""
        rank, lanes = self.stages[r], added_up(self.runs[r])
        return staggered(rank, lanes) if rank.strategy.cyclic else lanes

    def others_of(self, r: int) -> list[tuple[PricedOp, float]]:
        """What else takes a rank's time: the host, messages between slots, each so often."""
        rank = self.stages[r]
        slots = slots_of(rank) if rank.strategy.cyclic else []
        messages = [(op, count) for sent, count in slots for op in sent]
        return [(rank.model.host, rank.plan.microbatches), *messages]

    def schedule_us(self, r: int) -> tuple[float, float]:
        """Messages and bubble of a pipeline."""
        return 0.0, 0.0


def fullest(ranks: Sequence[Rank], memories: Sequence[Mapping[str, int]]) -> int:
    """The number of the rank whose memory has least left."""
    pairs = zip(ranks, memories, strict=True)
    left = [room_bytes(r.book.gpu, r.plan) - sum(m.values()) for r, m in pairs]
    return left.index(min(left))


def _accumulations(rank: Rank) -> int:
    """Counts how often layers add their gradients to those of earlier micro-batches.

    0 where gradient shards are added instead, and where gradients are copied into buckets.
    """
    if rank.strategy.every_micro:
        return 0
    how = rank.strategy
    return max(0, rank.plan.microbatches - 1 - (bool(how.reduce) and not how.early))
