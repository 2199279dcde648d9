"""How much a message on a GPU and the compute beside it slow each other.

A message of b bytes/s over each rank's link

- holds SMs, one for each of NCCL's channels: held = b / channel_bytes_per_s. Products, convolutions
  and attention lose more than these, as their grids are made for all SMs: sms / (sms - sms_lost *
  held). Where the software plans grids for fewer SMs, they lose at most those that it leaves to
  messages (``Stack.message_sms``): sms / (sms - held);
- reads and writes memory: share = memory_passes * b / hbm_bytes_per_s. Kernels that memory bounds
  have the rest of it: 1 / (1 - share).

Within a node the measured slowdown is larger: ``in_node``, unless products are planned so. Nothing
is slower than if both took turns. A byte costs about as much at any rate: a message between nodes
that takes long slows what is beside it little, but in all as much as it would in one node
(``itercast.compose.pricing.collectives``).
"""

from __future__ import annotations

from collections.abc import Mapping

from itercast.capture.base.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu

Slowdowns = tuple[float, float]  # slowdown of products, of kernels that memory bounds
CHANNEL_BYTES_PER_S: Mapping[str, float] = assumed(__file__, "channel_bytes_per_s")
IN_NODE: Mapping[str, float] = assumed(__file__, "in_node")
MEMORY_PASSES: float = assumed(__file__, "memory_passes")
SMS_LOST: float = assumed(__file__, "sms_lost")
TAKING_TURNS: float = assumed(__file__, "taking_turns")


def slowdowns(gpu: Gpu, bytes_per_s: float, *, in_node: bool, planned_sms: int = 0) -> Slowdowns:
    """Factors by which a message at this rate slows products, and kernels that memory bounds.

    ``planned_sms``: SMs that the software leaves to messages; 0: it plans with all.
    """
    channel = CHANNEL_BYTES_PER_S.get(gpu.architecture, CHANNEL_BYTES_PER_S["other"])
    held_sms = bytes_per_s / channel
    lost_sms = min(held_sms, planned_sms) if planned_sms else SMS_LOST * held_sms
    memory_frac = MEMORY_PASSES * bytes_per_s / gpu.hbm_bytes_per_s
    least = _least_in_node(bytes_per_s) if in_node and not planned_sms else 1.0
    return max(_without(lost_sms / gpu.sm_count), least), max(_without(memory_frac), least)


def _without(frac: float) -> float:
    """Slowdown of what has all but ``frac`` of a GPU; at most that of taking turns."""
    return 1 / max(1 - frac, 1 / TAKING_TURNS)


def _least_in_node(bytes_per_s: float) -> float:
    """Smallest slowdown that was measured within a node; 1 by a message that moves nothing."""
    return 1 + (IN_NODE["least"] - 1) * bytes_per_s / (bytes_per_s + IN_NODE["half_bytes_per_s"])


def mixed(beside: Slowdowns, products_frac: float) -> float:
    """Slowdown of kernels that spend ``products_frac`` of their time alone in products."""
    products, memory = beside
    return memory + products_frac * (products - memory)
