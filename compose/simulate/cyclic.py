"""Cyclic data parallelism (arXiv:2403.08837): replicas staggered by two slots of a 2N-slot step.

Adds: in each slot of backward a message of P/N bytes with summed gradients to the next replica, in
each slot of forward one with updated weights, instead of a burst of all_reduce; passes that join
gradients, add what came and copy weights out. Version 1 lets every gradient be a step old, version
2 only those whose weights are not there yet; both send the same. Memory: over all replicas
activations stay at (N+1)/2 of one replica's peak, where DDP peaks at N; a single replica's peak is
what it was.
"""

from __future__ import annotations

from compose.pricing.collectives import Message
from compose.pricing.work import side_by_side_us
from compose.simulate.rank import RankTasks


def slot_message(parameter_bytes: int, replicas: int, dtype: str) -> Message:
    """What one replica sends to the next in a slot."""
    size = max(1, parameter_bytes // replicas)
    return Message(kind="send_recv", axis="dp", message_bytes=size, dtype=dtype)


def steady_us(
    compute_us: float, message_us: float, replicas: int, contention: float, latency_us: float = 0.0
) -> float:
    """A steady step: 2N slots, each as long as its compute and its message side by side.

    ``latency_us`` of the message slows nothing.
    """
    slot_us = compute_us / (2 * replicas)
    both_us = side_by_side_us(slot_us, message_us - latency_us, contention)
    return 2 * replicas * max(both_us, message_us)


def hand_on(program: RankTasks) -> None:
    """Passes over each parameter: its gradient joined with others, added to, its weight taken."""
    for x in program.rank.layers:
        ops = [*x.into_bucket, *x.accumulate, *x.out_of_bucket]
        program.copies += ops
        program.lanes.work(x.fold(ops), f"hand on {x.layer.name}")
