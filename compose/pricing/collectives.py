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
        """The collective among ranks that these ``links`` join."""
        size = round(self.message_bytes * self._sent(links["world_size"], links["ranks_per_node"]))
        return Collective(op=self.kind, message_bytes=size, dtype=self.dtype, **links)

    def _sent(self, ranks: int, per_node: int) -> float:
        """Copies of a token that are sent, over those for each of its experts.

        Of n nodes with e/n of e experts each, n (1 - C(e - e/n, topk) / C(e, topk)) are expected to
        have one of a token's. Inside a node such kernels take as long as all_to_all of all copies:
        they send fewer, at a lower rate.
        """
        experts, topk = self.routed
        if not topk or ranks <= per_node:
            return 1.0
        nodes = ranks / per_node
        elsewhere = experts - experts / nodes
        missed = prod(max(0.0, elsewhere - i) / (experts - i) for i in range(topk))
        return nodes * (1 - missed) / topk


def formula_us(message: Message, group: Group, where: Cluster) -> float:
    """Time of a collective by latency and rate (``itercast.microbench.ops.step.alpha_beta``)."""
    if group.size == 1:
        return 0.0
    return float(floor_us(message.among(**_crossed(message, group, where)), where.gpu))


def _crossed(message: Message, group: Group, where: Cluster) -> dict[str, Any]:
    """Describes the links that a group's message crosses, by the fields of ``Collective``.

    From neighbour to neighbour one rank of a group sends to the next node, in place of all.
    """
    far = group.size > group.per_node
    senders = where.gpus_per_node
    if message.kind in NEIGHBOURS:
        senders = max(1, senders // group.per_node)
    return {
        "world_size": group.size,
        "ranks_per_node": where.gpus_per_node if where.gpu.kind == "cpu" else group.per_node,
        "link": "" if far else where.link(group.size),
        "network_bytes_per_s": where.network_share(senders) if far else 0.0,
        "link_bytes_per_s": where.link_bytes_per_s(group.per_node) if where.node else 0.0,
    }


Sent = tuple[Message, Group]


def price_messages(messages: Sequence[Message], book: PriceBook, where: Cluster) -> list[PricedOp]:
    """Prices each message as if no other were sent."""
    asked = [(m, where.on_one_cpu(where.groups[m.axis])) for m in messages]
    known = book.once(("sent", where.place), dict[Sent, PricedOp])
    if fresh := [one for one in dict.fromkeys(asked) if one not in known]:
        prefetch_messages(
            [*fresh, *((m, one) for m, g in fresh for one in _within(g))], book, where
        )
        known |= {one: _sent(*one, book, where) for one in fresh}
    sent = [known[one] for one in asked]
    for link in where.crossings:
        for i, message in enumerate(messages):
            far = message.among(world_size=where.groups[message.axis].size, ranks_per_node=1)
            us = link.crossed_us(far, message.axis, sent[i].duration_us)
            sent[i] = replace(sent[i], duration_us=us)
    return sent


def _within(group: Group) -> list[Group]:
    """The part of a group over several nodes that is in one of them, where it is a group."""
    split = 1 < group.per_node < group.size
    return [Group(size=group.per_node, per_node=group.per_node)] if split else []


def _sent(message: Message, group: Group, book: PriceBook, where: Cluster) -> PricedOp:
    """The message by the machine's factors, with what it costs compute beside it.

    The latter by its bytes/s over each rank's link; what compute loses is at least what it loses to
    the same message in one node, as this one crosses links of a node, too.
    """
    op = book.sent[where.place][message, group].among(group.size, group.per_node, book.machine)
    if op.duration_us == 0:
        return op
    moved = bytes_moved(message.among(world_size=group.size, ranks_per_node=group.per_node))
    rate = float(moved) / op.duration_us * 1e6
    beside = book.beside(rate, in_node=group.size <= group.per_node)
    for near in (_sent(message, one, book, where) for one in _within(group)):
        if beside and near.beside:
            share = min(1.0, near.duration_us / op.duration_us)
            both = zip(beside, near.beside, strict=True)
            products, memory = (max(own, 1 + share * (slower - 1)) for own, slower in both)
            beside = products, memory
    return replace(op, beside=beside)


def prefetch_messages(asked: Sequence[Sent], book: PriceBook, where: Cluster) -> None:
    """Prices in one call messages among groups of ranks, of which ``where`` says the links."""
    sent = book.sent.setdefault(where.place, {})
    fresh = [one for one in dict.fromkeys(asked) if one not in sent]
    if not fresh:
        return
    for message, group in [one for one in fresh if one[0].axis in TIERS]:
        us = tier_us(message.axis, message.kind, message.message_bytes, where.gpu)
        sent[message, group] = _priced(message, UNMODELLED, us, ((RATES[message.axis], 1.0),))
        fresh.remove((message, group))
    learned = "collective" in book.models
    made = _learned(fresh, book, where) if learned else (_by_formula(*x, where) for x in fresh)
    sent.update(zip(fresh, made, strict=True))


def _by_formula(message: Message, group: Group, where: Cluster) -> PricedOp:
    us = formula_us(message, group, where)
    return _priced(message, UNMODELLED, us, ((LATENCY, 1.0),))


def _assumed_shares(group: Group, scale: float, where: Cluster) -> AssumedShares:
    """Returns which assumptions a modelled collective's time rests on, and their shares of it.

    ``scale``: its time over that of the largest group that the model knows.
    """
    if group.size > group.per_node and where.network_assumed and where.gpu.kind != "cpu":
        return (("alpha_beta.network_bytes_per_s", 1.0),)
    return ((LATENCY, 1 - 1 / scale),) if scale > 1 else ()


def _smaller(group: Group) -> Iterator[Group]:
    """The group, then halves of it down to two ranks, first over fewer nodes."""
    while group.size >= 2:
        yield group
        half = group.size // 2
        group = Group(size=half, per_node=min(half, group.per_node))


def _as_measured(where: Cluster) -> Cluster:
    """The cluster with links at most as fast as the GPU's own, which its rows were measured over.

    What faster ones gain is the formula's: the models have nothing to tell of them.
    """
    node, own = where.node, where.gpu.link_bytes_per_s
    if node is None or not 0 < own < node.link_bytes_per_s:
        return where
    return replace(where, node=replace(node, link_bytes_per_s=own))


def _learned(asked: Sequence[Sent], book: PriceBook, where: Cluster) -> Iterator[PricedOp]:
    measured = _as_measured(where)
    answer = partial(_modelled, asked, book, measured)
    known = book.kept(["collective"], (where.place, list(asked)), answer)
    for one, found in zip(asked, known, strict=True):
        message, whole = one
        if not found:  # a group of one rank sends nothing
            yield _priced(message, "collective", 0.0)
            continue
        modelled_us, group = found[0], Group(size=found[1], per_node=found[2])
        scale = 1.0
        if group != whole or measured is not where:
            scale = formula_us(message, whole, where) / formula_us(message, group, measured)
        shares = _assumed_shares(whole, scale, where)
        yield _priced(message, "collective", modelled_us * scale, shares)


def _modelled(asked: Sequence[Sent], book: PriceBook, where: Cluster) -> list[tuple[Any, ...]]:
    """Of each message the time in us among the largest group that the model knows, and that group.

    Nothing for one that is sent to nobody.
    """
    nearest = _largest_known(asked, book, where)
    if not nearest:
        return [()] * len(asked)
    rows = _rows([(m, group) for (m, _), group in nearest.items()], book, where)
    known = _no_slower(rows, book)
    own, faster = (floor_us(columns(x, FAMILY), where.gpu) for x in (rows, known))
    priced = zip(nearest, book.expected("collective", known), own / faster, strict=True)
    us = {one: row["predicted_us"] * float(scale) for one, row, scale in priced}
    return [
        (us[one], nearest[one].size, nearest[one].per_node) if one in us else () for one in asked
    ]


def _no_slower(rows: pd.DataFrame, book: PriceBook) -> pd.DataFrame:
    """The messages over links no slower than any measured; the formula says what others lose."""
    envelope = getattr(book.models["collective"], "envelope", {})
    if book.gpu.kind == "cpu" or "log_bus_rate" not in envelope:
        return rows
    rate = FAMILY.features(columns(rows, FAMILY), book.gpu)["log_bus_rate"]
    faster = np.exp2(np.maximum(0.0, envelope["log_bus_rate"][0] - rate))
    return rows.assign(**{name: rows[name] * faster for name in LINKS})


def _largest_known(asked: Sequence[Sent], book: PriceBook, where: Cluster) -> dict[Sent, Group]:
    """For each message the largest group inside the model's envelope; its own where none is.

    As if all links were usual: over slower ones than any measured the same ranks do the same.
    """
    tried = [(one, smaller) for one in asked for smaller in _smaller(one[1])]
    found: dict[Sent, Group] = {}
    if tried:
        rows = _rows([(one[0], smaller) for one, smaller in tried], book, where)
        rows = rows.assign(network_bytes_per_s=0.0, link_bytes_per_s=0.0)
        inside = book.pricer.inside("collective", rows, {where.gpu.name: where.gpu})
        for (one, smaller), known in zip(tried, inside, strict=True):
            if known:
                found.setdefault(one, smaller)
        for one, smaller in tried:
            found.setdefault(one, smaller)
    return found


def _rows(asked: Sequence[Sent], book: PriceBook, where: Cluster) -> pd.DataFrame:
    facts: Row = {"gpu": where.gpu.name, "threads": book.threads, "cache": "warm"}
    facts["node"] = where.node.name if where.node else where.gpu.name
    points = [m.among(**_crossed(m, g, where)) for m, g in asked]
    names = [f.name for f in fields(Collective)]
    made = {name: [getattr(p, name) for p in points] for name in names}
    made["op"] = [measured_op(op, where.gpu.kind) for op in made["op"]]
    return pd.DataFrame(made | facts)


def _priced(message: Message, family: str, us: float, shares: AssumedShares = ()) -> PricedOp:
    return PricedOp(
        op=message.kind,
        family=family,
        phase="comm",
        duration_us=us,
        flops=0.0,
        assumed=shares,
        nbytes=message.message_bytes,
    )
