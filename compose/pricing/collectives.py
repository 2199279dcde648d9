"""Prices collectives among the ranks of one axis of a plan.

Inside its training envelope the family model prices them. Beyond it, the model's time for the
largest smaller group inside the envelope is scaled by formula_us(group) / formula_us(smaller
group); so is that over the GPU's own links where a node's are faster, and over the slowest measured
ones where they are slower. Without a model the time is ``formula_us``, counted as unmodelled.

Times rest on assumptions (``PricedOp.assumed``) where there is no model, for the part that scaling
adds, and wherever a message crosses a network whose rate no node file states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import pd
from itercast.compose.parallel.placement import TIERS, Cluster, Group
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import UNMODELLED, AssumedShares, PricedOp
from itercast.compose.pricing.tiers import RATES, tier_us
from itercast.learners.features.table import columns
from itercast.microbench.ops.step.alpha_beta import NEIGHBOURS, bytes_moved, floor_us
from itercast.microbench.ops.step.collective import FAMILY, Collective, measured_op
from itercast.microbench.store import Row

LINKS = ("network_bytes_per_s", "link_bytes_per_s")
LATENCY = "alpha_beta.step_us"  # the assumption that times by formula rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective along an axis; ``message_bytes`` is the whole buffer, as in nccl-tests.

    ``routed``: experts, and how many of them a token goes to, where it is sent once to each node
    that has some of these; (0, 0): once to each expert.
    """

    kind: str
    axis: str
    message_bytes: int
    dtype: str = "fp32"
    routed: tuple[int, int] = (0, 0)

    def among(self, **links: Any) -> Collective:
        """The collective among ranks that these ``links`` join, by the fields of ``Collective``."""
        sent_frac = self._sent_frac(links["world_size"], links["ranks_per_node"])
        size = round(self.message_bytes * sent_frac)
        return Collective(op=self.kind, message_bytes=size, dtype=self.dtype, **links)

    def _sent_frac(self, ranks: int, per_node: int) -> float:
        """Copies of a token that are sent over topk, if it is sent once per node, not per expert.

        n nodes hold e/n of e experts each, so n (1 - C(e - e/n, topk) / C(e, topk)) nodes are
        expected to have an expert of the token. Within a node it is 1: such kernels send fewer
        copies there, but at a lower rate.
        """
        experts, topk = self.routed
        if not topk or ranks <= per_node:
            return 1.0
        nodes = ranks / per_node
        elsewhere = experts - experts / nodes
        missed = prod(max(0.0, elsewhere - i) / (experts - i) for i in range(topk))
        return nodes * (1 - missed) / topk


def formula_us(message: Message, group: Group, cluster: Cluster) -> float:
    """Time of a collective by latency and rate (``itercast.microbench.ops.step.alpha_beta``)."""
    if group.size == 1:
        return 0.0
    return float(floor_us(message.among(**_crossed(message, group, cluster)), cluster.gpu))


def _crossed(message: Message, group: Group, cluster: Cluster) -> dict[str, Any]:
    """Describes the links that a group's message crosses, by the fields of ``Collective``.

    In an exchange with neighbours one rank of each group sends to the next node, else all do.
    """
    far = group.size > group.per_node
    senders = cluster.gpus_per_node
    if message.kind in NEIGHBOURS:
        senders = max(1, senders // group.per_node)
    return {
        "world_size": group.size,
        "ranks_per_node": cluster.gpus_per_node if cluster.gpu.kind == "cpu" else group.per_node,
        "link": "" if far else cluster.link(group.size),
        "network_bytes_per_s": cluster.network_share(senders) if far else 0.0,
        "link_bytes_per_s": cluster.link_bytes_per_s(group.per_node) if cluster.node else 0.0,
    }


Sent = tuple[Message, Group]  # a message, and the ranks that it is sent among


def price_messages(
    messages: Sequence[Message], book: PriceBook, cluster: Cluster
) -> list[PricedOp]:
    """Prices each message as if no other were sent."""
    sent_messages = [(m, cluster.on_one_cpu(cluster.groups[m.axis])) for m in messages]
    prices = book.once(("sent", cluster.place), dict[Sent, PricedOp])
    if fresh := [sent for sent in dict.fromkeys(sent_messages) if sent not in prices]:
        in_nodes = [(message, part) for message, group in fresh for part in _in_node(group)]
        prefetch_messages([*fresh, *in_nodes], book, cluster)
        prices |= {(m, group): _on_machine(m, group, book, cluster) for m, group in fresh}
    priced = [prices[sent] for sent in sent_messages]
    for link in cluster.crossings:
        for i, message in enumerate(messages):
            far = message.among(world_size=cluster.groups[message.axis].size, ranks_per_node=1)
            us = link.crossed_us(far, message.axis, priced[i].duration_us)
            priced[i] = replace(priced[i], duration_us=us)
    return priced


def _in_node(group: Group) -> list[Group]:
    """The part of a group in one node, if the group is on several and the part several ranks."""
    split = 1 < group.per_node < group.size
    return [Group(size=group.per_node, per_node=group.per_node)] if split else []


def _on_machine(message: Message, group: Group, book: PriceBook, cluster: Cluster) -> PricedOp:
    """The message by the machine's factors, with how much it slows compute beside it.

    The slowdown depends on its bytes/s over each rank's link, and is at least that of the same
    message within one node: a message between nodes crosses links inside a node, too.
    """
    op = book.sent[cluster.place][message, group].among(group.size, group.per_node, book.machine)
    if op.duration_us == 0:
        return op
    moved = bytes_moved(message.among(world_size=group.size, ranks_per_node=group.per_node))
    bytes_per_s = float(moved) / op.duration_us * 1e6
    slowdowns = book.beside(bytes_per_s, in_node=group.size <= group.per_node)
    for in_node in (_on_machine(message, part, book, cluster) for part in _in_node(group)):
        if slowdowns and in_node.beside:
            time_frac = min(1.0, in_node.duration_us / op.duration_us)
            pairs = zip(slowdowns, in_node.beside, strict=True)
            products, memory = (max(own, 1 + time_frac * (near - 1)) for own, near in pairs)
            slowdowns = products, memory
    return replace(op, beside=slowdowns)


def prefetch_messages(messages: Sequence[Sent], book: PriceBook, cluster: Cluster) -> None:
    """Prices messages among groups of ranks in one call, and keeps them in ``book.sent``.

    ``cluster``: the links of these groups.
    """
    prices = book.sent.setdefault(cluster.place, {})
    fresh = [sent for sent in dict.fromkeys(messages) if sent not in prices]
    if not fresh:
        return
    for message, group in [sent for sent in fresh if sent[0].axis in TIERS]:
        us = tier_us(message.axis, message.kind, message.message_bytes, cluster.gpu)
        prices[message, group] = _priced(message, UNMODELLED, us, ((RATES[message.axis], 1.0),))
        fresh.remove((message, group))
    if "collective" in book.models:
        priced = _learned(fresh, book, cluster)
    else:
        by_formula = ((message, formula_us(message, group, cluster)) for message, group in fresh)
        priced = (_priced(m, UNMODELLED, us, ((LATENCY, 1.0),)) for m, us in by_formula)
    prices.update(zip(fresh, priced, strict=True))


def _assumed_shares(group: Group, scale: float, cluster: Cluster) -> AssumedShares:
    """Returns which assumptions a modelled collective's time rests on, and their shares of it.

    ``scale``: its time over that of the largest group that the model knows.
    """
    if group.size > group.per_node and cluster.network_assumed and cluster.gpu.kind != "cpu":
        return (("alpha_beta.network_bytes_per_s", 1.0),)
    return ((LATENCY, 1 - 1 / scale),) if scale > 1 else ()


def _smaller(group: Group) -> Iterator[Group]:
    """The group, then halves of it down to two ranks, first over fewer nodes."""
    while group.size >= 2:
        yield group
        half = group.size // 2
        group = Group(size=half, per_node=min(half, group.per_node))


def _as_measured(cluster: Cluster) -> Cluster:
    """The cluster with links at most as fast as the GPU's own, which its rows were measured over.

    What faster links gain is computed by formula: no row shows it.
    """
    node, own = cluster.node, cluster.gpu.link_bytes_per_s
    if node is None or not 0 < own < node.link_bytes_per_s:
        return cluster
    return replace(cluster, node=replace(node, link_bytes_per_s=own))


def _learned(messages: Sequence[Sent], book: PriceBook, cluster: Cluster) -> Iterator[PricedOp]:
    """Prices messages by the family's model; beyond groups that it knows, scaled by formula."""
    measured = _as_measured(cluster)
    answer = partial(_modelled, messages, book, measured)
    answers = book.kept(["collective"], (cluster.place, list(messages)), answer)
    for (message, group), modelled in zip(messages, answers, strict=True):
        if not modelled:  # a group of one rank sends nothing
            yield _priced(message, "collective", 0.0)
            continue
        modelled_us, size, per_node = modelled
        as_measured = Group(size=size, per_node=per_node)
        scale = 1.0
        if as_measured != group or measured is not cluster:
            scale = formula_us(message, group, cluster) / formula_us(message, as_measured, measured)
        shares = _assumed_shares(group, scale, cluster)
        yield _priced(message, "collective", modelled_us * scale, shares)


def _modelled(messages: Sequence[Sent], book: PriceBook, cluster: Cluster) -> list[tuple[Any, ...]]:
    """For each message: (us, size, ranks per node) of the largest group that the model knows.

    () in a group of one rank, which sends nothing. Links slower than measured: scaled by formula.
    """
    nearest = _largest_known(messages, book, cluster)
    if not nearest:
        return [()] * len(messages)
    rows = _rows([(m, group) for (m, _), group in nearest.items()], book, cluster)
    measured_rows = _no_slower(rows, book)
    own_us, measured_us = (floor_us(columns(x, FAMILY), cluster.gpu) for x in (rows, measured_rows))
    priced = book.expected("collective", measured_rows)
    times_us = {
        sent: row["predicted_us"] * float(scale)
        for sent, row, scale in zip(nearest, priced, own_us / measured_us, strict=True)
    }
    return [
        (times_us[sent], nearest[sent].size, nearest[sent].per_node) if sent in times_us else ()
        for sent in messages
    ]


def _no_slower(rows: pd.DataFrame, book: PriceBook) -> pd.DataFrame:
    """Rows whose links are slower than any measured get the slowest measured rate."""
    envelope = getattr(book.models["collective"], "envelope", {})
    if book.gpu.kind == "cpu" or "log_bus_rate" not in envelope:
        return rows
    rate = FAMILY.features(columns(rows, FAMILY), book.gpu)["log_bus_rate"]
    faster = np.exp2(np.maximum(0.0, envelope["log_bus_rate"][0] - rate))
    return rows.assign(**{name: rows[name] * faster for name in LINKS})


def _largest_known(
    messages: Sequence[Sent], book: PriceBook, cluster: Cluster
) -> dict[Sent, Group]:
    """For each message the largest group inside the model's envelope; its own where none is.

    Looked up with rates of 0, the GPU's usual links: the group does not depend on slower ones.
    """
    tried = [(sent, smaller) for sent in messages for smaller in _smaller(sent[1])]
    largest: dict[Sent, Group] = {}
    if tried:
        rows = _rows([(message, smaller) for (message, _), smaller in tried], book, cluster)
        rows = rows.assign(network_bytes_per_s=0.0, link_bytes_per_s=0.0)
        inside = book.pricer.inside("collective", rows, {cluster.gpu.name: cluster.gpu})
        for (sent, smaller), is_inside in zip(tried, inside, strict=True):
            if is_inside:
                largest.setdefault(sent, smaller)
        for sent, smaller in tried:
            largest.setdefault(sent, smaller)
    return largest


def _rows(messages: Sequence[Sent], book: PriceBook, cluster: Cluster) -> pd.DataFrame:
    """A dataset row of each message, as family "collective" is priced by."""
    facts: Row = {"gpu": cluster.gpu.name, "threads": book.threads, "cache": "warm"}
    facts["node"] = cluster.node.name if cluster.node else cluster.gpu.name
    points = [m.among(**_crossed(m, g, cluster)) for m, g in messages]
    names = [f.name for f in fields(Collective)]
    made = {name: [getattr(p, name) for p in points] for name in names}
    made["op"] = [measured_op(op, cluster.gpu.kind) for op in made["op"]]
    return pd.DataFrame(made | facts)


def _priced(message: Message, family: str, us: float, shares: AssumedShares = ()) -> PricedOp:
    """The message as an op of this duration; ``shares`` of it rest on assumptions."""
    return PricedOp(
        op=message.kind,
        family=family,
        phase="comm",
        duration_us=us,
        assumed=shares,
        nbytes=message.message_bytes,
    )
