"""Ranks without a pipeline: their micro-batches one after the other, and replicas side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.simulate.breakdown import Shares, added_up
from itercast.compose.simulate.cyclic import send_to_next_replica, slots_of, staggered
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.timeline import side_by_side

Runs = list[tuple[Run, int]]  # in order, each with how often it is repeated


def replicas_of(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Replicas:
    """The step of ranks without a pipeline, one of each kind of replica."""
    alone = [micro_batches(rank, optimizer) for rank in ranks]
    unshared = [[*before, (last, 1)] for before, last in alone]
    return Replicas(stages=ranks, unshared=unshared, runs=_together(ranks, unshared, crowding))


def micro_batches(rank: Rank, optimizer: str) -> tuple[Runs, Run]:
    """Lays out the micro-batches of a rank without a pipeline, one after the other.

    Returns the micro-batches before the last as pairs (run, how often it is repeated), and the run
    of the last one, which synchronises gradients and ends with the optimizer. Micro-batches that
    send nothing are not listed: they are part of the last run. Training steps follow each other:
    where the host waits for no op nor for the step's end, it launches the next one meanwhile. It
    waits for gradients that it updates parameters by. Where it waits for a scaler, a step goes from
    there to there: the optimizer comes first.
    """
    micro = rank.plan.microbatches
    every = rank.strategy.every_micro or rank.strategy.scatters_each
    waits = any(w.stall_us > 0 for x in rank.layers for w in (x.forward_work, x.backward_work))
    scaled = rank.awaits_scale(optimizer)
    waits = waits or scaled
    ahead = optimizer != "none" and not waits and not rank.synchronised
    ahead = ahead and "parameters" not in rank.strategy.offload
    before, final = Runs(), RankProgram(rank, ahead=ahead)
    offload = rank.strategy.offload
    first_differs = not every or "parameters" in offload
    starts = scaled and not (rank.strategy.early or rank.strategy.after_update or offload)
    if starts:
        final.update(optimizer)
    if micro > 1 and (every or "activations" in offload):
        times = 1 if first_differs else micro - 1
        before = [(_one_micro_batch(rank, ahead, later=not first_differs), times)]
        if micro > 2 and first_differs:
            before.append((_one_micro_batch(rank, ahead, later=True), micro - 2))
    else:
        final.unsynchronised(micro - 1)
    final.forward()
    final.backward(later=micro > 1, sync=True)
    if rank.strategy.cyclic:
        send_to_next_replica(final)
    final.unscale(optimizer)
    if not starts:
        final.update(optimizer)
    return before, final.run()


def _one_micro_batch(rank: Rank, ahead: bool, *, later: bool) -> Run:
    """A micro-batch before the last one; ``later``: not the step's first."""
    program = RankProgram(rank, ahead=ahead)
    program.forward(last=False)
    program.backward(later=later, sync=rank.strategy.scatters_each)
    return program.run()


def _together(ranks: Sequence[Rank], alone: Sequence[Runs], crowding: float) -> Sequence[Runs]:
    """The runs of ranks (``alone``: each by itself) with the times of a simulation of all."""
    if len(ranks) == 1:
        return alone
    factors, joint = [rank.book.contention for rank in ranks], [Runs() for _ in ranks]
    for at_once in zip(*alone, strict=True):
        sent = {sum(task.once is not None for task in run.tasks) for run, _ in at_once}
        if len(sent) > 1:
            counts = ", ".join(map(str, sorted(sent)))
            raise ValueError(f"ranks of one job send equally many messages, these {counts}")
        spans = side_by_side([run.tasks for run, _ in at_once], factors, crowding)
        for of_rank, (run, times), times_us in zip(joint, at_once, spans, strict=True):
            of_rank.append((replace(run, spans=times_us), times))
    return joint


@dataclass(frozen=True, kw_only=True)
class Replicas:
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
        """Time that each rank computes; 0 of a single one, which is compared with no other."""
        alone = len(self.stages) == 1
        return [0.0 if alone else added_up(own).compute_us for own in self.runs]

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
        """As of ``Pipeline``: time that messages between stages add, and bubble; there are none."""
        return 0.0, 0.0

    def host_gap_us(self, r: int, idle_us: float) -> float:
        """The part of a rank's idle time that is there without the others, too: host launches."""
        alone = len(self.stages) == 1
        return idle_us if alone else min(idle_us, added_up(self.unshared[r]).idle_us)
