"""What CUDA, NCCL and torch's allocator leave of a GPU's memory for tensors, and its host's."""

from __future__ import annotations

from itercast.capture.base.assumptions import assumed
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import GREEDY
from itercast.compose.parallel.placement import Cluster
from itercast.microbench.hardware.spec import Gpu

FITS, MISFITS = "fits", "does not fit"  # a third verdict says how close it is
MEMORY_ERROR: float = assumed(__file__, "memory_error")
VISIBLE_FRAC: float = assumed(__file__, "visible_frac")
CONTEXT_BYTES: float = assumed(__file__, "context_bytes")
NCCL_BYTES: dict[str, float] = assumed(__file__, "nccl_bytes")
RESERVED_OVER_ALLOCATED: float = assumed(__file__, "reserved_over_allocated")


def room_bytes(gpu: Gpu, plan: ParallelPlan) -> int:
    """Bytes of tensors that fit a rank's GPU; a CPU's memory takes as many as it has.

    Every axis of the plan with more than one rank has an NCCL communicator; those of experts and of
    sharded tables also connect every pair of ranks, for all_to_all.
    """
    if gpu.kind == "cpu":
        return int(gpu.hbm_bytes)
    communicators = sum(n > 1 for n in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))
    pairs = (plan.ep > 1) + bool(plan.shard)
    taken = CONTEXT_BYTES + communicators * NCCL_BYTES["rings"] + pairs * NCCL_BYTES["pairs"]
    return max(0, int((VISIBLE_FRAC * gpu.hbm_bytes - taken) / RESERVED_OVER_ALLOCATED))


def verdict(memory_bytes: float, room: float) -> str:
    """FITS, MISFITS, or "too close..." where the memory model's error leaves it open.

    Both arguments are in bytes.
    """
    if not too_close(memory_bytes, room):
        return FITS if memory_bytes <= room else MISFITS
    low, high = (memory_bytes * (1 + sign * MEMORY_ERROR) / 1e9 for sign in (-1, 1))
    return f"too close: {low:.0f} to {high:.0f} of {room / 1e9:.0f} GB"


def too_close(memory_bytes: float, room: float) -> bool:
    """Whether ``room`` lies within the memory model's error around ``memory_bytes``."""
    return memory_bytes * (1 - MEMORY_ERROR) <= room < memory_bytes * (1 + MEMORY_ERROR)


def lacking_on_host(cluster: Cluster, offloaded_bytes: float) -> str:
    """Says that what each rank offloads does not fit its host's memory; "" where it does.

    Also "" where no node file states how much memory the host has.
    """
    node = cluster.node
    if node is None or not node.memory_bytes:
        return ""
    ranks = min(cluster.gpus_per_node, node.gpus_per_node)
    if ranks * offloaded_bytes <= node.memory_bytes:
        return ""
    needed = f"{ranks} x {offloaded_bytes / 1e9:,.0f} GB in host memory"
    return f"{needed}, {node.name} has {node.memory_bytes / 1e9:,.0f} GB"


def table_room_bytes(gpu: Gpu, ranks: int) -> int:
    """``room_bytes`` of a rank's GPU where tables are spread over ``ranks`` ranks."""
    return room_bytes(gpu, ParallelPlan(dp=ranks, shard=GREEDY if ranks > 1 else ""))
