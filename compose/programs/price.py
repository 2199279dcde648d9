"""Prices the launches of a captured rank: ops, collectives by the nodes that their ranks are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.cuda_variants import with_cuda_variants
from itercast.compose.pricing.collectives import Cluster, Group, Message, price_messages
from itercast.compose.pricing.host import Launches, launch_costs
from itercast.compose.pricing.price_book import PriceBook, PricedOp, priceable
from itercast.microbench.hardware.node import Node
from itercast.microbench.opcall import OpCall, StepCapture
from itercast.microbench.programs.log import COLLECTIVE, HOST_WAIT, RECORD, WAIT

MARKS = (RECORD, WAIT, HOST_WAIT)
# Collectives that no family measures, as those that move the same bytes the same way.
SAME_AS: Mapping[str, str] = {
    "send": "send_recv",
    "recv": "send_recv",
    "reduce": "broadcast",
    "gather": "all_gather",
    "scatter": "broadcast",
    "barrier": "all_reduce",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRank:
    """A rank's launches in order; ``ops`` has None for marks, which take no time."""

    calls: tuple[OpCall, ...]
    ops: tuple[PricedOp | None, ...]
    launches: Launches
    on_cpu: bool


def price_rank(step: StepCapture, book: PriceBook, node: Node | None, per_node: int) -> PricedRank:
    """Price the launches of one rank; ``per_node`` GPUs reach each other without the network."""
    on_cpu = book.gpu.kind == "cpu"
    step = step if on_cpu else with_cuda_variants(step)
    calls, cold = step.calls, cold_fractions(step, book.gpu)
    sent = [i for i, c in enumerate(calls) if c.op == COLLECTIVE]
    computed = [i for i, c in enumerate(calls) if c.op not in (COLLECTIVE, *MARKS)]
    priced = dict(zip(sent, _collectives([calls[i] for i in sent], book, node, per_node), strict=True))
    wanted = [priceable(calls[i], cold[i]) for i in computed]
    priced |= dict(zip(computed, book.price(wanted), strict=True))
    launched = StepCapture(calls=tuple(calls[i] for i in computed))
    return PricedRank(
        calls=calls,
        ops=tuple(priced.get(i) for i in range(len(calls))),
        launches=launch_costs(launched, step.host, book),
        on_cpu=on_cpu,
    )


def _collectives(
    calls: Sequence[OpCall], book: PriceBook, node: Node | None, per_node: int
) -> list[PricedOp]:
    """Collectives with durations; equal groups of ranks share a price."""
    groups: dict[str, Group] = {}
    messages = []
    for call in calls:
        group = group_of(call, per_node)
        axis = f"{group.size} ranks, {group.per_node} on a node"
        groups[axis] = group
        kind = call.kwargs["kind"]
        message = Message(
            kind=SAME_AS.get(kind, kind),
            axis=axis,
            message_bytes=max(1, call.kwargs["bytes"]),
            dtype=call.args[0].dtype,
            phase="comm",
        )
        messages.append(message)
    where = Cluster(gpu=book.gpu, node=node, gpus_per_node=per_node, groups=groups)
    return price_messages(messages, book, where)


def group_of(call: OpCall, per_node: int) -> Group:
    """How many ranks a collective has, and how many of them share a node at most.

    Ranks fill one node after the other. A message has two: ``src`` and ``dst``.
    """
    facts = call.kwargs
    ranks = (facts["rank"], facts["peer"]) if facts["peer"] >= 0 else facts["ranks"]
    return Group(size=len(ranks), per_node=max(Counter(r // per_node for r in ranks).values()))
