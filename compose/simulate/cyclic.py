"""Cyclic data parallelism (arXiv:2403.08837): replicas staggered by two slots of a 2N-slot step.

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
from dataclasses import replace

from itercast.capture.base.assumptions import assumed
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.simulate.breakdown import Shares
from itercast.compose.simulate.rank import Rank, RankTasks
from itercast.microbench.ops.step.alpha_beta import EXCHANGE

EMPTY_BYTES: int = assumed(__file__, "empty_bytes")  # so few bytes take the latency alone


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
    return [(price_messages(m, rank.book, rank.where), count) for m, count in messages_of(rank)]


def latency_us(messages: Sequence[Message], rank: Rank) -> float:
    """Time in us for which ranks on a CPU sleep, and so slow no compute, within these messages.

    It is the time of the same messages with EMPTY_BYTES; 0 on a GPU.
    """
    if rank.book.gpu.kind != "cpu":
        return 0.0
    empty = [replace(m, message_bytes=min(EMPTY_BYTES, m.message_bytes)) for m in messages]
    return sum(op.duration_us for op in price_messages(empty, rank.book, rank.where))


def steady_us(
    compute_us: float, message_us: float, slots: int, contention: float, asleep_us: float = 0.0
) -> float:
    """Time of ``slots`` slots: in each, 1 / slots of compute runs beside messages.

    ``message_us``: messages of a slot, of which ``asleep_us`` does not slow compute.
    """
    both_us = side_by_side_us(compute_us / slots, message_us - asleep_us, contention)
    return slots * max(both_us, message_us)


def send_to_next_replica(program: RankTasks) -> None:
    """Add the copies and additions of what replicas send to the next one, by layer."""
    for x in program.rank.layers:
        out = () if program.how.handed_on else x.out_of_bucket
        ops = [*x.into_bucket, *x.accumulate, *out]
        program.copies += ops
        program.lanes.work(x.fold(ops), f"send {x.layer.name}")


def staggered(rank: Rank, alone: Shares) -> Shares:
    """Times of a step of cyclic data parallelism, from those of a replica ``alone``.

    A step has 2 dp slots of time; in each its messages run beside the slot's compute.
    """
    end_us = comm_us = slowed_us = 0.0
    for messages, count in messages_of(rank):
        sent = price_messages(messages, rank.book, rank.where)
        message_us = sum(m.duration_us for m in sent)
        asleep_us = min(message_us, latency_us(messages, rank))
        own_us = alone.end_us * count / (2 * rank.plan.dp)
        contention = max(rank.book.contention_of(m, rank.products_frac) for m in sent)
        end_us += steady_us(own_us, message_us, count, contention, asleep_us)
        comm_us += count * message_us
        slowed_us += (contention - 1) * min(own_us, count * (message_us - asleep_us))
    slowed_us = min(end_us, alone.compute_us + slowed_us)
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)
