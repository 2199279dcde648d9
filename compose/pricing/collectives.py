"""What a collective costs among the ranks of one axis of a plan: learned, and by hierarchy beyond.

Inside the training envelope the family model answers. Beyond it the model's answer for the largest
smaller group it knows is scaled by ``ring_us``, which knows the node's links and the network.
Without a model ``ring_us`` stands in, counted as unmodelled and right within a factor of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from compose.parallel.plan import ParallelPlan, ranks_per_node
from compose.pricing.price_book import UNMODELLED, PriceBook, PricedOp
from microbench.hardware.node import Node
from microbench.hardware.spec import Gpu
from microbench.ops.step.collective import CPU_COPIES, Collective, bus_factor

RANKS_PER_NODE = 8  # assumption where the plan names no node
NETWORK_BYTES_PER_S = 25e9  # assumption, as above: one 200 Gb/s port per GPU
EMPTY_BYTES = 64
ALPHA_US = {"cpu": 30.0, "link": 5.0, "network": 10.0}  # assumption: one message's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate; ``per_node`` of them share a node."""

    size: int
    per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices a plan runs on: their links, and who sits where."""

    gpu: Gpu
    node: Node | None
    gpus_per_node: int
    groups: Mapping[str, Group]

    def link(self, ranks: int) -> str:
        """What the slowest hop among so many GPUs of a node runs over."""
        return self.node.link_among(ranks) if self.node else self.gpu.usual_link

    def link_bytes_per_s(self, ranks: int) -> float:
        """One direction of that hop."""
        if self.gpu.kind == "cpu":
            return self.gpu.hbm_bytes_per_s / CPU_COPIES
        fast = self.node.link_bytes_per_s if self.node else self.gpu.link_bytes_per_s
        slow = self.gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S
        return slow if self.link(ranks) == "pcie" else fast

    @property
    def network_bytes_per_s(self) -> float:
        """A GPU's share of the network between nodes."""
        return (self.node.network_bytes_per_s if self.node else 0.0) or NETWORK_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective over an axis; ``message_bytes`` is the whole buffer (nccl-tests)."""

    kind: str
    axis: str
    message_bytes: int
    dtype: str = "fp32"
    phase: str = "backward"


def cluster(plan: ParallelPlan, gpu: Gpu, node: Node | None = None) -> Cluster:
    """Placement, innermost first: tp, cp, dp, pp.

    Axis ``shard`` is cp and dp together, over which parameters are sharded; ``ep`` the inner part
    of dp and ``expert`` the replicas of its experts; ``near`` and ``far`` two ranks in one node and
    in two; ``world`` all ranks. A CPU is one node of any number of ranks.
    """
    per_node = plan.world_size
    if gpu.kind != "cpu":
        fitting = node.gpus_per_node if node else max(RANKS_PER_NODE, gpu.link_joins)
        if node and node.topology != "pcie" and node.gpus_per_domain:
            fitting = node.gpus_per_domain
        per_node = ranks_per_node(plan, fitting)
    inner = {"tp": 1, "cp": plan.tp, "shard": plan.tp, "dp": plan.tp * plan.cp}
    inner |= {"ep": inner["dp"], "pp": inner["dp"] * plan.dp, "world": 1}
    size = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "ep": plan.ep, "pp": plan.pp}
    size |= {"shard": plan.cp * plan.dp, "world": plan.world_size}
    inner["expert"], size["expert"] = plan.tp * plan.cp * plan.ep, plan.cp * plan.dp // plan.ep
    groups = {
        axis: Group(size=n, per_node=max(1, min(n, per_node // inner[axis])))
        for axis, n in size.items()
    }
    groups |= {"near": Group(size=2, per_node=2), "far": Group(size=2, per_node=1)}
    return Cluster(gpu=gpu, node=node, gpus_per_node=per_node, groups=groups)


def ring_us(message: Message, group: Group, where: Cluster) -> float:
    """Latency of log2(n) messages, and bytes over the slowest link.

    Between nodes every rank of the group on a node has its own share of the network: the bus runs
    at min(link, ranks on the node * share). all_reduce counts its latency twice.
    """
    n, kind = group.size, message.kind
    if n == 1:
        return 0.0
    params = Collective(op=kind, message_bytes=message.message_bytes, world_size=n)
    wire_bytes = float(bus_factor(params)) * message.message_bytes
    rate, alpha = where.link_bytes_per_s(group.per_node), ALPHA_US["link"]
    if where.gpu.kind == "cpu":
        alpha = ALPHA_US["cpu"]
    elif n > group.per_node:
        shared = group.per_node if kind not in ("send_recv", "all_to_all") else 1
        rate, alpha = min(rate, shared * where.network_bytes_per_s), ALPHA_US["network"]
    steps = 1.0 if kind == "send_recv" else float((n - 1).bit_length())
    return (2 if kind == "all_reduce" else 1) * steps * alpha + wire_bytes / rate * 1e6


def price_messages(messages: Sequence[Message], book: PriceBook, where: Cluster) -> list[PricedOp]:
    """Each message alone on the machine; the book remembers them by group."""
    node = where.node.name if where.node else ""
    keys = [(m, where.groups[m.axis], node) for m in messages]
    fresh = [m for m, key in zip(messages, keys, strict=True) if key not in book.sent]
    if fresh:
        on_cpu = where.gpu.kind == "cpu"
        asked = list(dict.fromkeys([*fresh, *map(_empty, fresh if on_cpu else ())]))
        learned = "collective" in book.models
        made = _learned(asked, book, where) if learned else (_stand_in(m, where) for m in asked)
        found = dict(zip(asked, made, strict=True))
        for m, op in found.items():
            if on_cpu and m.message_bytes > EMPTY_BYTES:  # as much as next to no bytes take
                latency_us = min(op.duration_us, found[_empty(m)].duration_us)
                op = replace(op, latency_us=latency_us)
            book.sent[m, where.groups[m.axis], node] = op
    return [book.sent[key] for key in keys]


def _empty(message: Message) -> Message:
    """The same with next to no bytes."""
    return replace(message, message_bytes=min(EMPTY_BYTES, message.message_bytes))


def _stand_in(message: Message, where: Cluster) -> PricedOp:
    us = ring_us(message, where.groups[message.axis], where)
    return _priced(message, UNMODELLED, (us, us / 2, us * 2), inside=False)


def _smaller(group: Group) -> Iterator[Group]:
    """The group itself, then halves of it down to two ranks; nodes go first."""
    while group.size >= 2:
        yield group
        half = group.size // 2
        group = Group(size=half, per_node=min(half, group.per_node))


def _learned(messages: Sequence[Message], book: PriceBook, where: Cluster) -> Iterator[PricedOp]:
    nearest = _nearest(messages, book, where)
    answers: dict[Message, Any] = {}
    if nearest:
        rows = _rows([(m, group) for m, (group, _) in nearest.items()], book, where)
        answers = dict(
            zip(nearest, book.expected("collective", rows).to_dict("records"), strict=True)
        )
    for message in messages:
        if message not in nearest:  # to itself
            yield _priced(message, "collective", (0.0, 0.0, 0.0), inside=True)
            continue
        (group, known), whole = nearest[message], where.groups[message.axis]
        scale = ring_us(message, whole, where) / ring_us(message, group, where)
        columns = ("predicted_us", "predicted_us_p10", "predicted_us_p90")
        us, low_us, high_us = (float(answers[message][c]) * scale for c in columns)
        yield _priced(message, "collective", (us, low_us, high_us), inside=known and group == whole)


def _nearest(
    messages: Sequence[Message], book: PriceBook, where: Cluster
) -> dict[Message, tuple[Group, bool]]:
    """The largest group that the model knows for each message, its own where there is none."""
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
    message: Message, family: str, us: tuple[float, float, float], *, inside: bool
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
    )
