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
from microbench.ops.family import (
    Family,
    Part,
    Workload,
    itemsize_bytes,
    log_uniform,
    torch_dtype,
)

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
HALVES = ("all_gather", "reduce_scatter")  # of an all_reduce: the same steps, as long
CPU_COPIES = 8  # a byte through the loopback moves about eight times through memory
ALONG = ("log_bus_us", "log_message", "log_share")
# Bytes that need less than the first take as long as none; beyond the second, twice as many take
# twice as long.
ENDS_US = (0.02, 100.0)
# What crosses a network says nothing of what does not, nor do Vidur's rows of others: they are
# rank 0's kernel alone, its wait for the others included.
APART = {"link=network": 0.15, "stack=vidur": 0.15}
ALIKE = {"op": 4.0, "dtype": 7.0, "gpu": 7.0, "stack": 7.0, "place": 0.5}  # nothing exactly


def _part(amplitude: float, **reach: float) -> Part:
    return Part(amplitude=amplitude, reach={**APART, **reach})


# Parts chosen by hand, their settings then moved a little, by gradient descent, to what rows within
# nodes forecast best of cells, tails, GPU counts and systems left out: figures of bench-public for
# them are somewhat too good.
CURVE = (
    _part(0.13, log_message=6.4, link=0.51),
    _part(0.2, log_bus_us=4.2, pattern=0.3),
    _part(0.15, log_message=2.3, log_local=1.2, log_nodes=1.5),
    _part(0.26, log_message=7.6, log_bus_rate=0.26),
    _part(0.14, log_bus_us=2.2, log_bus_rate=1.0, log_local=1.8, log_nodes=1.5, pattern=0.3),
    _part(0.095, log_bus_us=2.5, log_bus_rate=0.3, pattern=0.3),
    _part(0.092, log_message=0.98, log_bus_rate=0.28, log_local=1.6, log_nodes=1.5, pattern=0.3),
    _part(0.046, log_message=6.8, gpu=0.3, stack=1.0),
    _part(0.029, log_message=1.4, log_local=1.5, log_nodes=1.5, op=0.3, gpu=0.3, stack=1.0),
    _part(0.33, log_message=6.4, place=0.3),
    _part(0.18, log_message=5.0, log_local=1.5, log_nodes=1.5, pattern=0.3, place=0.3),
    _part(
        0.34,
        log_bus_us=7.2,
        log_message=14.0,
        log_bus_rate=6.6,
        log_local=1.3,
        log_nodes=2.0,
        pattern=1.4,
        link=0.67,
        **ALIKE,
    ),
    _part(
        0.13,
        log_bus_us=30.0,
        log_message=30.0,
        log_bus_rate=1.3,
        log_local=1.0,
        log_nodes=1.0,
        pattern=0.97,
        link=0.95,
        **ALIKE,
    ),
    _part(
        0.098,
        log_bus_us=0.68,
        log_message=0.63,
        log_bus_rate=0.36,
        log_local=0.5,
        log_nodes=0.5,
        pattern=0.49,
        link=1.0,
        **ALIKE,
    ),
    _part(0.16, log_share=1.1, log_bus_rate=0.27, pattern=0.3),
    _part(0.095, log_share=3.1, log_bus_rate=1.1, log_local=2.0, log_nodes=1.5, op=0.3),
)
NETWORK_BYTES_PER_S = 25e9  # one 200 Gb/s port per GPU, where no node file says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over ``world_size`` ranks, ``ranks_per_node`` of them on each node.

    ``link`` is the slowest link it crosses: nvlink, pairwise (a bridge), pcie or network; empty
    where ranks and nodes say it. ``network_bytes_per_s``: a GPU's share of the NICs, 0: unknown.
    """

    op: str
    message_bytes: int
    world_size: int = 2
    ranks_per_node: int = 2
    node: str = ""
    link: str = ""
    network_bytes_per_s: float = 0.0
    dtype: str = "fp32"


def sweep() -> Iterator[Collective]:
    """Endless: 64 B to 64 MiB; all_reduce more often, since gradients go by it, some in fp16.

    A CPU adds fp16 numbers one by one: of half the bytes it is no faster.
    """
    rng = np.random.default_rng(12)
    while True:
        op = str(rng.choice((*OPS, "all_reduce", "all_reduce")))
        half = op == "all_reduce" and rng.random() < 0.3
        size = 64 * log_uniform(rng, 1, 2**20)
        yield Collective(op=op, message_bytes=size, dtype="fp16" if half else "fp32")


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


def across_nodes(p: Any) -> Any:
    """Whether some ranks reach each other over the network only."""
    stated = np.isin(p.link, ["nvlink", "pairwise", "pcie"])
    return np.greater(p.world_size, p.ranks_per_node) & ~stated


def link(p: Any, gpu: Gpu) -> Any:
    """The slowest link each crosses, the usual one where it does not say."""
    usual = np.where(across_nodes(p), "network", gpu.usual_link)
    return np.where(np.equal(p.link, ""), usual, p.link)


def link_rate(p: Any, gpu: Gpu) -> Any:
    """Bytes/s of one direction of the links inside a node."""
    fast = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
    return np.where(np.equal(link(p, gpu), "pcie"), gpu.pcie_bytes_per_s or fast, fast)


def link_us(p: Any, gpu: Gpu) -> Any:
    """Time of the bytes over the links inside a node."""
    alone = np.equal(p.ranks_per_node, 1) & across_nodes(p)
    return np.where(alone, 0.0, bytes_moved(p) / link_rate(p, gpu) * 1e6)


def network_us(p: Any) -> Any:
    """Time of the bytes over the network.

    A ring enters and leaves each node once per byte and its channels spread over the NICs of all
    local GPUs. An all_reduce adds up within nodes first (NCCL's trees), so that nodes count, not
    ranks. Pairs use one NIC; in an all_to_all each GPU sends its share for other nodes.
    """
    local, world = np.asarray(p.ranks_per_node, dtype=float), np.asarray(p.world_size, dtype=float)
    rate = np.where(np.asarray(p.network_bytes_per_s) > 0, p.network_bytes_per_s, 1.0)
    rate = np.where(np.asarray(p.network_bytes_per_s) > 0, rate, NETWORK_BYTES_PER_S)
    by_tree = 2 * np.maximum(world - local, 0) / world * p.message_bytes / (rate * local)
    by_ring = np.where(np.equal(p.op, "all_reduce"), by_tree, bytes_moved(p) / (rate * local))
    by_pairs = p.message_bytes * np.maximum(world - local, 0) / world / rate
    alone = p.message_bytes / rate
    seconds = np.where(np.equal(p.op, "all_to_all"), by_pairs, by_ring)
    seconds = np.where(np.equal(p.op, "send_recv"), alone, seconds)
    return np.where(across_nodes(p), seconds * 1e6, 0.0)


def floor_us(p: Any, gpu: Gpu) -> Any:
    """The slower of the links inside a node and the network, and latencies of the steps.

    Ring steps are paid in part only: NCCL takes trees for small messages.
    """
    steps = np.log2(np.maximum(p.world_size, 2))
    if gpu.kind == "cpu":
        return bytes_moved(p) / (gpu.hbm_bytes_per_s / CPU_COPIES) * 1e6 + 20.0 * steps
    latency_us = np.where(across_nodes(p), 12.0, 5.0)
    return np.maximum(link_us(p, gpu), network_us(p)) + latency_us * (1 + 0.3 * steps)


def place(p: Any) -> Any:
    """The cluster of what crosses a network, which says more than the GPU does; else nothing."""
    rate = np.asarray(p.network_bytes_per_s, dtype=float).round().astype(str).astype(object)
    named = np.not_equal(p.node, "")
    name = np.where(named, np.asarray(p.node, dtype=object), rate)
    return np.where(across_nodes(p), name, "")


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes of the whole, of a rank's share and of what crosses the links; ranks and nodes.

    The message is also measured by the time its bytes need, which sets the protocol NCCL takes.
    """
    local = np.maximum(1, np.minimum(p.ranks_per_node, p.world_size))
    bus_us = np.asarray(np.maximum(link_us(p, gpu), network_us(p)), dtype=float)
    moved = np.asarray(bytes_moved(p), dtype=float)
    return {
        "op": p.op,
        "dtype": p.dtype,
        "link": link(p, gpu),
        "log_message": np.log2(np.maximum(p.message_bytes, 1)),
        "log_share": np.log2(np.maximum(p.message_bytes / np.asarray(p.world_size), 1)),
        "log_bus": np.log2(np.maximum(bytes_moved(p), 1)),
        "log_bus_us": np.log2(np.maximum(bus_us, 1e-6)),
        "log_bus_rate": np.log2(np.maximum(moved, 1e-3) / np.maximum(bus_us, 1e-9)),
        "log_world": np.log2(np.maximum(p.world_size, 1)),
        "log_local": np.log2(local),
        "log_nodes": np.log2(np.maximum(1, np.asarray(p.world_size) / local)),
        "pattern": np.where(np.isin(p.op, HALVES), "half", p.op),
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
    curve=CURVE,
    along=ALONG,
    ends=ENDS_US,
    place=place,
)
