"""Collectives among ranks: all_reduce, gather, scatter, all_to_all, broadcast, send/receive.

``message_bytes`` is the whole buffer, as nccl-tests counts it: the input of reduce_scatter and
all_to_all, the output of all_gather. Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
CPU_COPIES = 8  # a byte through the loopback moves about eight times through memory
NETWORK_BYTES_PER_S = 25e9  # one 200 Gb/s port per GPU, where no node file says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over ``world_size`` ranks, ``ranks_per_node`` of them on each node."""

    op: str
    message_bytes: int
    world_size: int = 2
    ranks_per_node: int = 2
    node: str = ""
    dtype: str = "fp32"


def sweep() -> Iterator[Collective]:
    """Endless: 64 B to 64 MiB, all_reduce twice as often as the others."""
    rng = np.random.default_rng(12)
    while True:
        op = str(rng.choice((*OPS, "all_reduce")))
        yield Collective(op=op, message_bytes=64 * log_uniform(rng, 1, 2**20))


def build(p: Collective, device: str) -> Workload:
    """Needs a process group of ``p.world_size`` ranks; a second call waits for the first."""
    import torch  # lazy: formulas must import where torch is absent
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() != p.world_size:
        raise ValueError(f"{p.op} needs a process group of {p.world_size} ranks")
    dtype = torch_dtype(p.dtype)
    per_rank = max(1, p.message_bytes // itemsize_bytes(p.dtype) // p.world_size)
    whole = torch.zeros(per_rank * p.world_size, dtype=dtype, device=device)
    part = torch.zeros(per_rank, dtype=dtype, device=device)
    return Workload(run=_runs(p.op, whole, part), through_aten=False)


def _runs(op: str, whole: Any, part: Any) -> Callable[[], object]:
    import torch.distributed as dist  # lazy, as above

    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    other = whole.clone()
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "send_recv": lambda: _ring(whole, other),
    }
    return runs[op]


def _ring(send: Any, receive: Any) -> None:
    """Every rank sends to the next and receives from the one before."""
    import torch.distributed as dist  # lazy, as above

    rank, n = dist.get_rank(), dist.get_world_size()
    works = [dist.isend(send, (rank + 1) % n), dist.irecv(receive, (rank - 1) % n)]
    for work in works:
        if work is not None:
            work.wait()


def bus_factor(p: Any) -> Any:
    """busbw / algbw: all_reduce 2(n-1)/n; gather, scatter and all_to_all (n-1)/n; else 1."""
    n = np.asarray(p.world_size, dtype=float)
    share = (n - 1) / n
    whole = np.isin(p.op, ["broadcast", "send_recv"])
    return np.where(np.equal(p.op, "all_reduce"), 2 * share, np.where(whole, 1.0, share))


def flops(p: Any) -> Any:
    """One addition per element received by the reducing ones."""
    reduces = np.isin(p.op, ["all_reduce", "reduce_scatter"])
    n = np.asarray(p.world_size, dtype=float)
    return np.where(reduces, (n - 1) / n, 0.0) * p.message_bytes / itemsize_bytes(p.dtype)


def bytes_moved(p: Any) -> Any:
    """Bytes over each rank's link."""
    return bus_factor(p) * p.message_bytes


def floor_us(p: Any, gpu: Gpu) -> Any:
    """Bytes over the slowest link of the ring, and one latency per step of a ring or a tree."""
    if gpu.kind == "cpu":
        rate: Any = gpu.hbm_bytes_per_s / CPU_COPIES
        latency_us = 20.0
    else:
        fast = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
        across = np.greater(p.world_size, p.ranks_per_node)
        rate = np.where(across, np.minimum(fast, NETWORK_BYTES_PER_S), fast)
        latency_us = 5.0
    steps = np.log2(np.maximum(p.world_size, 2))
    return bytes_moved(p) / rate * 1e6 + latency_us * steps


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes of the whole, of a rank's share and of what crosses the link; ranks and nodes."""
    nodes = np.maximum(1, np.asarray(p.world_size) / np.maximum(1, p.ranks_per_node))
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_message": np.log2(np.maximum(p.message_bytes, 1)),
        "log_share": np.log2(np.maximum(p.message_bytes / np.asarray(p.world_size), 1)),
        "log_bus": np.log2(np.maximum(bytes_moved(p), 1)),
        "log_world": np.log2(np.maximum(p.world_size, 1)),
        "log_nodes": np.log2(nodes),
    }


FAMILY = Family(
    name="collective",
    params=Collective,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
    floor_us=floor_us,
    ranks=2,
)
