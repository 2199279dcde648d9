"""Ranks without a pipeline: their micro-batches one after the other, and replicas side by side.

Cyclic data parallelism (arXiv:2403.08837): replicas staggered by two slots of a 2N-slot step.

Adds: in each slot of backward a message of P/N bytes with summed gradients to the next replica, in
each slot of forward one with updated weights, instead of all_reduces at the end; copies that join
gradients, additions of those received, copies of weights out of the message. In version 1 every
gradient is a step old, in version 2 only those whose weights have not arrived yet; both send the
same. Memory: over all replicas activations stay at (N+1)/2 of one replica's peak, where DDP peaks
at N; a single replica's peak is the same.

With zero=3 a rank holds the stages that it is at: of N staggered replicas one is at each of N
stages in every slot, and two slots later the next one is there. So parameters of a stage go round,
one copy in forward and one in backward, and the sums of its gradients in backward, all to the next
replica. A rank sends 2N messages of parameters and N of gradients, of P/N each: 3P, as ZeRO-3 does
by collectives. It updates the stage that it owns, with 1/N of the optimizer's state. Memory: of
parameters and of sums a stage in use, one that arrives and one that is sent, 3 P/N each. Messages
are held flat and used where they arrive.

With pp the replicas are the micro-batches, which share the GPU of each stage: replicas that are
staggered by two slots are at different stages in every slot, so N GPUs do what N replicas of N
stages do on N^2. That is 1F1B that never drains (``stage_rank.Pipeline``): gradients are a step
old, a step has no bubble, and takes as long as the busiest stage's forwards, backwards and update.
Memory: stage j holds the activations of N - j replicas at once, as 1F1B does, and the weights of
two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from itercast.capture.base.assumptions import assumed
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.simulate.breakdown import Shares, added_up
from itercast.compose.simulate.rank import Rank, RankTasks, Run
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.timeline import side_by_side
from itercast.microbench.ops.step.alpha_beta import EXCHANGE

EMPTY_BYTES: int = assumed(__file__, "empty_bytes")  # so few bytes take the latency alone
Runs = list[tuple[Run, int]]  # in order, each with how often it is repeated


def replicas_of(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Replicas:
    """The step of ranks without a pipeline, one of each kind of replica."""
    alone = [micro_batches(rank, optimizer) for rank in ranks]
    unshared = [[*before, (last, 1)] for before, last in alone]
    return Replicas(stages=ranks, unshared=unshared, runs=_together(ranks, unshared, crowding))


def micro_batches(rank: Rank, optimizer: str) -> tuple[Runs, Run]:
    """Lays out the micro-batches of a rank without a pipeline, one after the other.

    Returns pairs (run of a micro-batch, how often), and the last run, which synchronises and ends
    with the optimizer. Micro-batches that send nothing are part of the last run. The host launches
    the next step while one runs, unless it waits for an op, for the end of steps, or for gradients
    to update parameters by. If it waits for a gradient scaler, the steps are cut there: a run
    begins with the optimizer.
    """
    micro = rank.plan.microbatches
    every = rank.strategy.every_micro or rank.strategy.scatters_each
    waits = any(w.stall_us > 0 for x in rank.layers for w in (x.forward_work, x.backward_work))
    scaled = rank.awaits_scale(optimizer)
    ahead = optimizer != "none" and not (waits or scaled or rank.synchronised)
    ahead = ahead and "parameters" not in rank.strategy.offload
    before, final = Runs(), RankProgram(rank, ahead=ahead)
    offload = rank.strategy.offload
    first_differs = not every or "parameters" in offload
    starts = scaled and not (rank.strategy.gossip or rank.strategy.after_update or offload)
    if starts:
        final.step(optimizer)
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
    (final.unscale if starts else final.update)(optimizer)
    return before, final.run()


def _one_micro_batch(rank: Rank, ahead: bool, *, later: bool) -> Run:
    """A micro-batch before the last one; ``later``: not the step's first."""
    program = RankProgram(rank, ahead=ahead)
    program.forward(last=False)
    program.backward(later=later, sync=rank.strategy.scatters_each)
    return program.run()


def _together(ranks: Sequence[Rank], alone: Sequence[Runs], crowding: float) -> Sequence[Runs]:
    """The runs of all ranks, simulated together, so that a message waits for its last rank.

    ``alone``: the runs of each rank by itself, a run being one micro-batch and how often it is
    made. ``crowding``: how many times as long compute takes while ranks share cores. Tasks with a
    ``once`` are messages, of which each rank must have as many; ValueError otherwise.
    """
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
    """Ranks without a pipeline, one per kind: the runs of each beside the others, and alone."""

    stages: Sequence[Rank]
    runs: Sequence[Runs]
    unshared: Sequence[Runs]

    def totals_us(self) -> list[float]:
        """When each rank's step ends."""
        if self.stages[0].strategy.cyclic:
            return [self.lanes_of(r).end_us for r in range(len(self.stages))]
        return [sum(times * run.end_us for run, times in own) for own in self.runs]

    def loads_us(self) -> list[float]:
        """Time that each rank computes; 0 for a single rank, which is compared with no other."""
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
        """What else takes a rank's time, and how often: the host, messages between slots."""
        rank = self.stages[r]
        slots = slots_of(rank) if rank.strategy.cyclic else []
        messages = [(op, count) for sent, count in slots for op in sent]
        return [(rank.model.host, rank.plan.microbatches), *messages]

    def schedule_us(self, r: int) -> tuple[float, float]:
        """As of ``Pipeline``: time that messages between stages add, and bubble; there are none."""
        return 0.0, 0.0

    def host_gap_us(self, r: int, idle_us: float) -> float:
        """The part of a rank's idle time that it would have alone, too: host launches."""
        alone = len(self.stages) == 1
        return idle_us if alone else min(idle_us, added_up(self.unshared[r]).idle_us)


def messages_of(rank: Rank) -> Sequence[tuple[Sequence[Message], int]]:
    """Pairs (messages from a replica to the next in a slot, number of such slots in a step)."""
    n, trained = rank.plan.dp, sum(x.layer.trained_bytes for x in rank.layers)
    dtype = next((p.dtype for x in rank.layers for p in x.layer.parameters), "fp32")
    sums = Message(kind=EXCHANGE, axis="dp", message_bytes=max(1, trained // n), dtype=dtype)
    if not rank.plan.zero:
        return [([sums], 2 * n)]
    held = sum(x.layer.parameter_bytes for x in rank.layers)
    handed_on = replace(sums, message_bytes=max(1, held // n))
    return [([handed_on], n), ([handed_on, rank.strategy.of_gradients(sums)], n)]


def slots_of(rank: Rank) -> Sequence[tuple[Sequence[PricedOp], int]]:
    """``messages_of`` with durations."""
    return [(price_messages(m, rank.book, rank.cluster), count) for m, count in messages_of(rank)]


def latency_us(messages: Sequence[Message], rank: Rank) -> float:
    """Time in us for which ranks on a CPU sleep, and so slow no compute, within these messages.

    It is the time of the same messages with EMPTY_BYTES; 0 on a GPU.
    """
    if rank.book.gpu.kind != "cpu":
        return 0.0
    empty = [replace(m, message_bytes=min(EMPTY_BYTES, m.message_bytes)) for m in messages]
    return sum(op.duration_us for op in price_messages(empty, rank.book, rank.cluster))


def steady_us(
    compute_us: float, message_us: float, slots: int, contention: float, asleep_us: float = 0.0
) -> float:
    """Time of ``slots`` slots: in each, an equal part of compute runs beside the slot's messages.

    ``message_us``: messages of a slot, of which ``asleep_us`` does not slow compute.
    """
    both_us = side_by_side_us(compute_us / slots, message_us - asleep_us, contention)
    return slots * max(both_us, message_us)


def send_to_next_replica(program: RankTasks) -> None:
    """Add the copies and additions of what replicas send to the next one, by layer."""
    for x in program.rank.layers:
        out = () if program.strategy.handed_on else x.out_of_bucket
        ops = [*x.into_bucket, *x.accumulate, *out]
        program.copies += ops
        program.lanes.work(x.fold(ops), f"send {x.layer.name}")


def staggered(rank: Rank, alone: Shares) -> Shares:
    """Times of a step of cyclic data parallelism, from those of a replica ``alone``.

    A step has 2 dp slots; in each its messages run beside the slot's compute, which they slow.
    """
    end_us = comm_us = slowed_us = 0.0
    for messages, count in messages_of(rank):
        sent = price_messages(messages, rank.book, rank.cluster)
        message_us = sum(m.duration_us for m in sent)
        asleep_us = min(message_us, latency_us(messages, rank))
        own_us = alone.end_us * count / (2 * rank.plan.dp)
        contention = max(rank.book.contention_of(m, rank.products_frac) for m in sent)
        end_us += steady_us(own_us, message_us, count, contention, asleep_us)
        comm_us += count * message_us
        slowed_us += (contention - 1) * min(own_us, count * (message_us - asleep_us))
    compute_us = min(end_us, alone.compute_us + slowed_us)
    exposed_us = max(0.0, end_us - max(compute_us, alone.end_us))
    return Shares(end_us, compute_us, exposed_us, comm_us)
