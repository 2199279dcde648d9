"""Cyclic data parallelism (arXiv:2403.08837): replicas staggered by two slots of a 2N-slot step.

Adds: in each slot a message of P/N bytes to the next replica with summed gradients, and one with
updated weights, instead of a burst of all_reduce. Version 1 lets every gradient be a step old,
version 2 only those whose weights are not there yet; both send the same. Memory: over all replicas
activations stay at (N+1)/2 of one replica's peak, where DDP peaks at N; a single replica's peak is
what it was.
"""

from __future__ import annotations

from compose.collectives import Message
from compose.work import side_by_side_us


def slot_message(parameter_bytes: int, replicas: int, dtype: str) -> Message:
    """What one replica sends to the next in a slot."""
    size = max(1, parameter_bytes // replicas)
    return Message(kind="send_recv", axis="dp", message_bytes=size, dtype=dtype)


def steady_us(compute_us: float, message_us: float, replicas: int, contention: float) -> float:
    """A steady step: 2N slots, each as long as its compute and its two messages side by side."""
    slot_us = compute_us / (2 * replicas)
    return 2 * replicas * side_by_side_us(slot_us, 2 * message_us, contention)
