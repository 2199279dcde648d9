"""What a collective costs among the ranks of one axis of a plan: learned, and by hierarchy beyond.

Inside the training envelope the family model answers. Beyond it the model's answer for the largest
smaller group it knows is scaled by ``ring_us``, which knows the node's links and the network.
Without a model ``ring_us`` stands in, counted as unmodelled and right within a factor of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from compose.plan import ParallelPlan, ranks_per_node
from compose.priced import UNMODELLED, PriceBook, PricedOp
from microbench.hardware.node import Node
from microbench.hardware.spec import Gpu
from microbench.ops.collective import CPU_COPIES, Collective, bus_factor

RANKS_PER_NODE = 8  # assumption where the plan names no node
NETWORK_BYTES_PER_S = 25e9  # assumption, as above: one 200 Gb/s port per GPU
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

    @property
    def link_bytes_per_s(self) -> float:
        """One direction of the fastest link between neighbours in a node."""
        if self.gpu.kind == "cpu":
            return self.gpu.hbm_bytes_per_s / CPU_COPIES
        link = self.node.link_bytes_per_s if self.node else self.gpu.link_bytes_per_s
        return link or self.gpu.pcie_bytes_per_s or NETWORK_BYTES_PER_S

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
        fitting = node.gpus_per_node if node else RANKS_PER_NODE
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
    rate, alpha = where.link_bytes_per_s, ALPHA_US["link"]
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
    fresh = list(
        dict.fromkeys(m for m, key in zip(messages, keys, strict=True) if key not in book.sent)
    )
    if fresh:
        learned = "collective" in book.pricer.models
        made = _learned(fresh, book, where) if learned else (_stand_in(m, where) for m in fresh)
        for m, op in zip(fresh, made, strict=True):
            book.sent[m, where.groups[m.axis], node] = op
    return [book.sent[key] for key in keys]


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
    tried = [(i, g) for i, m in enumerate(messages) for g in _smaller(where.groups[m.axis])]
    facts = {"gpu": where.gpu.name, "threads": book.threads, "cache": "warm"}
    facts["node"] = where.node.name if where.node else where.gpu.name
    facts["network_bytes_per_s"] = where.network_bytes_per_s
    rows = pd.DataFrame(
        {
            **facts,
            "op": messages[i].kind,
            "message_bytes": messages[i].message_bytes,
            "dtype": messages[i].dtype,
            "world_size": g.size,
            "ranks_per_node": g.per_node,
        }
        for i, g in tried
    )
    answers: dict[int, list[tuple[Group, dict[str, float]]]] = {}
    if tried:
        table = book.pricer.price("collective", rows, {where.gpu.name: where.gpu})
        for (i, g), row in zip(tried, table.to_dict("records"), strict=True):
            answers.setdefault(i, []).append((g, row))  # type: ignore[arg-type]
    for i, message in enumerate(messages):
        if i not in answers:
            yield _priced(message, "collective", (0.0, 0.0, 0.0), inside=True)
            continue
        whole = answers[i][0]
        known = next((a for a in answers[i] if a[1]["in_envelope"]), whole)
        scale = ring_us(message, whole[0], where) / ring_us(message, known[0], where)
        columns = ("predicted_us", "predicted_us_p10", "predicted_us_p90")
        us, low_us, high_us = (float(known[1][c]) * scale for c in columns)
        inside = known is whole and bool(known[1]["in_envelope"])
        yield _priced(message, "collective", (us, low_us, high_us), inside=inside)


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
