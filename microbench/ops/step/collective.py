"""Collectives among ranks: all_reduce, gather, scatter, all_to_all, broadcast, and neighbours'.

Neighbours send one way (``send_recv``), as stages of a pipeline do, or each receives as it sends
(``exchange``), as in rings. Links of GPUs carry both ways at once: there they are one op.

``message_bytes`` is the whole buffer, as nccl-tests counts it: the input of reduce_scatter and
all_to_all, the output of all_gather. Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import dist, torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import ITEMSIZE_BYTES, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    KernelTerm,
    Numbers,
    Tensor,
    Workload,
    itemsize_bytes,
)
from itercast.microbench.ops.sizes import points_of
from itercast.microbench.ops.step.alpha_beta import (
    EXCHANGE,
    EXPERTS,
    HALVES,
    NEIGHBOURS,
    across_nodes,
    bytes_moved,
    floor_us,
    groups_beside,
    is_among,
    link,
    link_us,
    network_us,
)

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", *NEIGHBOURS)
ALONG = ("log_bus_us", "log_message", "log_share")
COVARIANCE = [KernelTerm(**term) for term in assumed(__file__, "covariance")]
# Beyond these ends the ratio to the roofline is that at the end.
SMOOTH_US = tuple(assumed(__file__, "smooth_us"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over ``world_size`` ranks, ``ranks_per_node`` of them on each node.

    ``link`` is the slowest link it crosses: nvlink, pairwise (a bridge), bridged (PCIe between
    pairs that a bridge joins: no GPU both sends and receives over it), pcie or network; empty where
    ranks and nodes say it. ``ranks_per_node`` counts those that reach each other without the
    network: of a host, or of a link domain over several. On a CPU they are all that share it: where
    they are more than ``world_size``, groups of so many ranks each send at the same time.
    ``network_bytes_per_s``: a GPU's share of the NICs, 0: unknown; ``link_bytes_per_s`` of the
    links inside a node, 0: the GPU's own.
    """

    op: str
    message_bytes: int
    world_size: int = 2
    ranks_per_node: int = 2
    node: str = ""
    link: str = ""
    network_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    dtype: str = "fp32"


def build(p: Collective, device: str) -> Workload:
    """Buffers of one rank; all ranks that exist are divided into groups of ``p.world_size``."""
    if not dist.is_initialized() or dist.get_world_size() % p.world_size:
        raise ValueError(f"{p.op} needs process groups of {p.world_size} ranks")
    dtype = torch_dtype(p.dtype)
    per_rank = max(1, p.message_bytes // ITEMSIZE_BYTES[p.dtype] // p.world_size)
    whole = torch.zeros(per_rank * p.world_size, dtype=dtype, device=device)
    part = torch.zeros(per_rank, dtype=dtype, device=device)
    return Workload(
        run=_collective_call(p.op, whole, part, _group(p.world_size)), through_aten=False
    )


@cache
def _group(size: int) -> dist.ProcessGroup | None:
    """This rank's group where ranks are divided into groups of ``size``; None: one of all."""
    return dist.new_subgroups(size)[0] if size < dist.get_world_size() else None


def _collective_call(
    op: str, whole: Tensor, part: Tensor, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    """A function that runs a collective on ``whole``, all ranks' elements, or a rank's ``part``."""
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    other = whole.clone()
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "send_recv": lambda: _to_next(whole, other, group, both=whole.device.type != "cpu"),
        EXCHANGE: lambda: _to_next(whole, other, group, both=True),
    }
    return runs[op]


def measured_op(op: str, kind: str) -> str:
    """The op of which devices of this ``kind`` have rows: of GPUs a send_recv is both ways."""
    return "send_recv" if op == EXCHANGE and kind != "cpu" else op


def _to_next(send: Tensor, receive: Tensor, group: dist.ProcessGroup | None, *, both: bool) -> None:
    """Sends to the next rank and receives from the previous one, as nccl-tests does.

    If not ``both``, even ranks send and odd ones receive.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    works = []
    if both or rank % 2 == 0:
        works.append(dist.isend(send, group=group, group_dst=(rank + 1) % n))
    if both or rank % 2 == 1:
        works.append(dist.irecv(receive, group=group, group_src=(rank - 1) % n))
    for work in works:
        if work is not None:
            work.wait()


def flops(p: Collective) -> Numbers:
    """One addition per element that a reducing rank receives."""
    reduces = is_among(p.op, ["all_reduce", "reduce_scatter"])
    n = np.asarray(p.world_size, dtype=float)
    return np.where(reduces, (n - 1) / n, 0.0) * p.message_bytes / itemsize_bytes(p.dtype)


def place(p: Collective) -> Numbers:
    """The cluster's name, or else its network rate, for messages across a network; else ""."""
    rate = np.asarray(p.network_bytes_per_s, dtype=float).round().astype(str).astype(object)
    named = np.not_equal(p.node, "")
    name = np.where(named, np.asarray(p.node, dtype=object), rate)
    return np.where(across_nodes(p), name, "")


def features(p: Collective, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes of the whole, of a rank's share and of what crosses the links; ranks and nodes.

    ``log_bus_us`` is the time that the bytes need, by which NCCL chooses its protocol.
    """
    local = np.maximum(1, np.minimum(p.ranks_per_node, p.world_size))
    bus_us = np.asarray(np.maximum(link_us(p, gpu), network_us(p)), dtype=float)
    moved = np.asarray(bytes_moved(p), dtype=float)
    kinds = [is_among(p.op, HALVES), is_among(p.op, EXPERTS)]
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
        "log_beside": np.log2(groups_beside(p)),
        "log_nodes": np.log2(np.maximum(1, np.asarray(p.world_size) / local)),
        "pattern": np.select(kinds, ["half", "experts"], p.op),
    }


FAMILY = Family(
    name="collective",
    params=Collective,
    sweep=points_of(12, facts_of(__file__), Collective),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
    floor_us=floor_us,
    ranks=2,
    kernel=COVARIANCE,
    along=ALONG,
    ends=SMOOTH_US,
    place=place,
)
