"""Cyclic data parallelism (arXiv:2403.08837): replicas staggered by two slots of a 2N-slot step.

Adds: in each slot of backward a message of P/N bytes with summed gradients to the next replica, in
each slot of forward one with updated weights, instead of all_reduces at the end; copies that join
gradients, additions of those received, copies of weights out of the message. In version 1 every
gradient is a step old, in version 2 only those whose weights have not arrived yet; both send the
same. Memory: over all replicas activations stay at (N+1)/2 of one replica's peak, where DDP peaks
at N; a single replica's peak is the same.
"""

from __future__ import annotations

from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.simulate.breakdown import Shares
from itercast.compose.simulate.rank import Rank, RankTasks


def slot_message(rank: Rank) -> PricedOp:
    """The message from one replica to the next in a slot."""
    size = sum(x.layer.trained_bytes for x in rank.layers) // rank.plan.dp
    dtype = next((p.dtype for x in rank.layers for p in x.layer.parameters), "fp32")
    message = Message(kind="send_recv", axis="dp", message_bytes=max(1, size), dtype=dtype)
    return price_messages([message], rank.book, rank.where)[0]


def steady_us(
    compute_us: float, message_us: float, replicas: int, contention: float, latency_us: float = 0.0
) -> float:
    """Time of a step in steady state: 2N slots, in each compute and message side by side.

    ``latency_us`` of the message does not slow compute.
    """
    slot_us = compute_us / (2 * replicas)
    both_us = side_by_side_us(slot_us, message_us - latency_us, contention)
    return 2 * replicas * max(both_us, message_us)


def send_to_next_replica(program: RankTasks) -> None:
    """Add the copies and additions of what replicas send to the next one, by layer."""
    for x in program.rank.layers:
        ops = [*x.into_bucket, *x.accumulate, *x.out_of_bucket]
        program.copies += ops
        program.lanes.work(x.fold(ops), f"send {x.layer.name}")


def staggered(rank: Rank, alone: Shares, op: PricedOp) -> Shares:
    """Times of a step of cyclic data parallelism, from those of a replica ``alone``.

    A step has 2 dp slots of time; in each a message ``op`` runs beside the slot's compute.
    """
    n = rank.plan.dp
    end_us = steady_us(alone.end_us, op.duration_us, n, rank.contention, op.latency_us)
    comm_us, copied_us = 2 * n * op.duration_us, 2 * n * (op.duration_us - op.latency_us)
    slowed_us = alone.compute_us + (rank.contention - 1) * min(alone.end_us, copied_us)
    slowed_us = min(end_us, slowed_us)
    return Shares(end_us, slowed_us, max(0.0, end_us - max(slowed_us, alone.end_us)), comm_us)
