"""Prices collectives among the ranks of one axis of a plan.

Inside its training envelope the family model prices them. Beyond it, the model's time for the
largest smaller group inside the envelope is scaled by ring_us(group) / ring_us(smaller group).
Without a model the time is ``ring_us``, counted as unmodelled.

Times rest on assumptions (``PricedOp.assumed``) where there is no model, for the part that scaling
adds, and wherever a message crosses a network whose rate no node file states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from compose.parallel.plan import ParallelPlan, ranks_per_node
from compose.pricing.assumed_time import AssumedShares
from compose.pricing.price_book import UNCERTAINTY_FACTOR, UNMODELLED, PriceBook, PricedOp
from microbench.assumptions import assumed
from microbench.hardware.node import Node
from microbench.hardware.spec import Gpu
from microbench.ops.step.collective import (
    CPU_COPIES,
    NETWORK_BYTES_PER_S,
    STEP_LATENCY_US,
    Collective,
    bus_factor,
)

RANKS_PER_NODE: int = assumed(__file__, "ranks_per_node")  # where the plan names no node
EMPTY_BYTES = 64  # a message of so few bytes takes its latency alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one collective; ``per_node`` of them share a node."""

    size: int
    per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices that a plan runs on: their links, and the groups of ranks by axis."""

    gpu: Gpu
    node: Node | None
    gpus_per_node: int
    groups: Mapping[str, Group]

    def link(self, ranks: int) -> str:
        """The slowest kind of link among so many GPUs of a node."""
        return self.node.link_among(ranks) if self.node else self.gpu.usual_link

    def link_bytes_per_s(self, ranks: int) -> float:
        """Bytes/s of one direction of that link."""
        if self.gpu.kind == "cpu":
            return float(self.gpu.hbm_bytes_per_s / CPU_COPIES)
        fast = self.node.link_rate(ranks) if self.node else self.gpu.link_bytes_per_s
        slow = self.gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
        return slow if self.link(ranks) == "pcie" else fast

    @property
    def network_bytes_per_s(self) -> float:
        """A GPU's share of the network between nodes."""
        return NETWORK_BYTES_PER_S if self.network_assumed else self._stated_network

    @property
    def network_assumed(self) -> bool:
        """Whether no node file states the network's rate."""
        return self._stated_network == 0

    @property
    def _stated_network(self) -> float:
        return self.node.network_bytes_per_s if self.node else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective over an axis; ``message_bytes`` is the whole buffer, as in nccl-tests."""

    kind: str
    axis: str
    message_bytes: int
    dtype: str = "fp32"
    phase: str = "backward"


def gpus_per_domain(gpu: Gpu, node: Node | None = None) -> int:
    """GPUs that reach each other without the network: those of a rack-scale link domain or a host.

    Placement and plan search both take it from here: a "node" of a plan is such a domain.
    """
    if node is None:
        return max(RANKS_PER_NODE, gpu.link_joins)
    rack_scale = node.topology != "pcie" and node.gpus_per_domain
    return node.gpus_per_domain if rack_scale else node.gpus_per_node


def cluster(plan: ParallelPlan, gpu: Gpu, node: Node | None = None) -> Cluster:
    """Placement, innermost first: tp, cp, dp, pp.

    Axis ``shard`` is cp and dp together, over which parameters are sharded, or with hsdp the inner
    part of it and ``replicate`` the outer part; ``ep`` the inner part
    of dp and ``expert`` the replicas of its experts; ``intra_node`` two ranks of one node,
    ``inter_node`` two of different nodes; ``world`` all ranks. A CPU is one node of any number of
    ranks.
    """
    per_node = plan.world_size
    if gpu.kind != "cpu":
        per_node = ranks_per_node(plan, gpus_per_domain(gpu, node))
    inner = {"tp": 1, "cp": plan.tp, "shard": plan.tp, "dp": plan.tp * plan.cp}
    inner |= {"ep": inner["dp"], "pp": inner["dp"] * plan.dp, "world": 1}
    size = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "ep": plan.ep, "pp": plan.pp}
    size |= {"shard": plan.shards, "world": plan.world_size}
    inner["replicate"] = plan.tp * plan.shards
    size["replicate"] = plan.cp * plan.dp // plan.shards
    inner["expert"], size["expert"] = plan.tp * plan.cp * plan.ep, plan.cp * plan.dp // plan.ep
    groups = {
        axis: Group(size=n, per_node=max(1, min(n, per_node // inner[axis])))
        for axis, n in size.items()
    }
    groups["intra_node"] = Group(size=2, per_node=2)
    groups["inter_node"] = Group(size=2, per_node=1)
    return Cluster(gpu=gpu, node=node, gpus_per_node=per_node, groups=groups)


def ring_us(message: Message, group: Group, where: Cluster) -> float:
    """Time of a collective by formula: steps * latency + bytes on the wire / rate.

    steps = ceil(log2(ranks)), twice for all_reduce, 1 for send_recv. The rate is that of the
    slowest link; between nodes each rank of the group on a node has its own share of the network:
    rate = min(link, ranks on the node * share).
    """
    n, kind = group.size, message.kind
    if n == 1:
        return 0.0
    params = Collective(op=kind, message_bytes=message.message_bytes, world_size=n)
    wire_bytes = float(bus_factor(params)) * message.message_bytes
    rate, latency_us = where.link_bytes_per_s(group.per_node), STEP_LATENCY_US["link"]
    if where.gpu.kind == "cpu":
        latency_us = STEP_LATENCY_US["cpu"]
    elif n > group.per_node:
        shared = group.per_node if kind not in ("send_recv", "all_to_all") else 1
        rate, latency_us = min(rate, shared * where.network_bytes_per_s), STEP_LATENCY_US["network"]
    steps = 1.0 if kind == "send_recv" else float((n - 1).bit_length())
    return float((2 if kind == "all_reduce" else 1) * steps * latency_us + wire_bytes / rate * 1e6)


def price_messages(messages: Sequence[Message], book: PriceBook, where: Cluster) -> list[PricedOp]:
    """Time of each message alone on the machine; the book keeps them by group."""
    node = where.node  # itself: files of one name may state other rates
    keys = [(m, where.groups[m.axis], node) for m in messages]
    fresh = [m for m, key in zip(messages, keys, strict=True) if key not in book.sent]
    if fresh:
        on_cpu = where.gpu.kind == "cpu"
        asked = list(dict.fromkeys([*fresh, *map(_empty, fresh if on_cpu else ())]))
        learned = "collective" in book.models
        made = (
            _learned(asked, book, where) if learned else (_ring_fallback(m, where) for m in asked)
        )
        found = dict(zip(asked, made, strict=True))
        for m, op in found.items():
            if on_cpu and m.message_bytes > EMPTY_BYTES:
                latency_us = min(op.duration_us, found[_empty(m)].duration_us)
                op = replace(op, latency_us=latency_us)
            book.sent[m, where.groups[m.axis], node] = op
    return [book.sent[key] for key in keys]


def _empty(message: Message) -> Message:
    """The same message with so few bytes that it takes its latency alone."""
    return replace(message, message_bytes=min(EMPTY_BYTES, message.message_bytes))


def _ring_fallback(message: Message, where: Cluster) -> PricedOp:
    us = ring_us(message, where.groups[message.axis], where)
    bounds = (us, us / UNCERTAINTY_FACTOR, us * UNCERTAINTY_FACTOR)
    return _priced(message, UNMODELLED, bounds, (("collective.step_latency_us", 1.0),))


def _assumed_shares(group: Group, scale: float, where: Cluster) -> AssumedShares:
    """What of a modelled collective's time is assumed; ``scale``: its time over the model's."""
    if group.size > group.per_node and where.network_assumed and where.gpu.kind != "cpu":
        return (("collective.network_bytes_per_s", 1.0),)
    return (("collective.step_latency_us", 1 - 1 / scale),) if scale > 1 else ()


def _smaller(group: Group) -> Iterator[Group]:
    """The group, then halves of it down to two ranks, first over fewer nodes."""
    while group.size >= 2:
        yield group
        half = group.size // 2
        group = Group(size=half, per_node=min(half, group.per_node))


def _learned(messages: Sequence[Message], book: PriceBook, where: Cluster) -> Iterator[PricedOp]:
    nearest = _largest_known(messages, book, where)
    modelled: dict[Message, Any] = {}
    if nearest:
        rows = _rows([(m, group) for m, (group, _) in nearest.items()], book, where)
        modelled = dict(
            zip(nearest, book.expected("collective", rows).to_dict("records"), strict=True)
        )
    for message in messages:
        if message not in nearest:  # a group of one rank sends nothing
            yield _priced(message, "collective", (0.0, 0.0, 0.0), inside=True)
            continue
        (group, known), whole = nearest[message], where.groups[message.axis]
        scale = ring_us(message, whole, where) / ring_us(message, group, where)
        columns = ("predicted_us", "predicted_us_p10", "predicted_us_p90")
        us, low_us, high_us = (float(modelled[message][c]) * scale for c in columns)
        shares = _assumed_shares(whole, scale, where)
        inside = known and group == whole
        yield _priced(message, "collective", (us, low_us, high_us), shares, inside=inside)


def _largest_known(
    messages: Sequence[Message], book: PriceBook, where: Cluster
) -> dict[Message, tuple[Group, bool]]:
    """For each message the largest group inside the model's envelope, and whether there is one.

    Its own group where there is none.
    """
    tried = [(m, g) for m in messages for g in _smaller(where.groups[m.axis])]
    found: dict[Message, tuple[Group, bool]] = {}
    if tried:
        rows = _rows(tried, book, where)
        inside = book.pricer.inside("collective", rows, {where.gpu.name: where.gpu})
        for (m, g), known in zip(tried, inside, strict=True):
            if m not in found or (known and not found[m][1]):
                found[m] = (g, bool(known))
    return found


def _rows(asked: Sequence[tuple[Message, Group]], book: PriceBook, where: Cluster) -> pd.DataFrame:
    facts = {"gpu": where.gpu.name, "threads": book.threads, "cache": "warm"}
    facts["node"] = where.node.name if where.node else where.gpu.name
    columns: dict[str, list[Any]] = {
        "op": [m.kind for m, _ in asked],
        "message_bytes": [m.message_bytes for m, _ in asked],
        "dtype": [m.dtype for m, _ in asked],
        "world_size": [g.size for _, g in asked],
        "ranks_per_node": [g.per_node for _, g in asked],
        "link": ["" if g.size > g.per_node else where.link(g.size) for _, g in asked],
        "network_bytes_per_s": [
            where.network_bytes_per_s if g.size > g.per_node else 0.0 for _, g in asked
        ],
    }
    return pd.DataFrame({**columns, **facts})


def _priced(
    message: Message,
    family: str,
    us: tuple[float, float, float],
    shares: AssumedShares = (),
    *,
    inside: bool = False,
) -> PricedOp:
    return PricedOp(
        op=message.kind,
        family=family,
        phase=message.phase,
        duration_us=us[0],
        low_us=us[1],
        high_us=us[2],
        flops=0.0,
        in_envelope=inside,
        assumed=shares,
    )
