"""Prices the launches of a captured rank: ops, collectives by the nodes that their ranks are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.programs.program import COLLECTIVE, HOST, MARKS
from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.cuda_variants import with_cuda_variants, with_whole_networks
from itercast.compose.graph.inductor import inductor_kernels
from itercast.compose.pricing.collectives import Cluster, Group, Message, price_messages
from itercast.compose.pricing.host import Launches, launch_costs, python_op
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import PricedOp, priceable
from itercast.compose.simulate.fsdp import FORWARD_SHARE
from itercast.compose.simulate.stage_rank import SCHEDULE_SHARE
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu

DISPATCH_SHARE: float = assumed(__file__, "dispatch_share")
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
    """A rank's launches in order; ``ops`` has None for marks, which take no time.

    ``matmul_s``: seconds of its matrix products at peak.
    """

    calls: tuple[OpCall, ...]
    ops: tuple[PricedOp | None, ...]
    launches: Launches
    on_cpu: bool
    matmul_s: float


def price_rank(step: StepCapture, book: PriceBook, node: Node | None, per_node: int) -> PricedRank:
    """Price the launches of one rank; ``per_node`` GPUs reach each other without the network."""
    on_cpu = book.gpu.kind == "cpu"
    step = inductor_kernels(
        step if on_cpu else with_whole_networks(step), apart=lambda call: not call.compiled
    )
    step = step if on_cpu else _with_launches(with_cuda_variants(step))
    calls, cold = step.calls, cold_fractions(step, book.gpu, per_node if on_cpu else 1)
    sent = [i for i, c in enumerate(calls) if c.op == COLLECTIVE]
    computed = [i for i, c in enumerate(calls) if c.op not in (COLLECTIVE, HOST, *MARKS)]
    priced = dict(
        zip(sent, _collectives([calls[i] for i in sent], book, node, per_node), strict=True)
    )
    priced |= {i: _python(c, book) for i, c in enumerate(calls) if c.op == HOST}
    wanted = [priceable(calls[i], cold[i]) for i in computed]
    priced |= dict(zip(computed, book.price(wanted), strict=True))
    launched = StepCapture(calls=tuple(calls[i] for i in computed if not calls[i].graphed))
    return PricedRank(
        calls=calls,
        ops=tuple(priced.get(i) for i in range(len(calls))),
        launches=launch_costs(launched, step.host, book),
        on_cpu=on_cpu,
        matmul_s=sum(w.matmul_s(book.gpu) for w in wanted),
    )


def _with_launches(step: StepCapture) -> StepCapture:
    """The step where the first op of each CUDA graph is launched, and the others with it."""
    calls, last = [], 0
    for call in step.calls:
        computed = call.op not in (COLLECTIVE, HOST, *MARKS)
        calls.append(replace(call, graphed=0) if computed and call.graphed != last else call)
        last = call.graphed if computed else last
    return replace(step, calls=tuple(calls))


def _python(call: OpCall, book: PriceBook) -> PricedOp:
    """Python of a parallel wrapper: what of its event's time is spent at this call."""
    event, tensors = call.args
    if event == "dtensor_op":
        return python_op("tp_product", 1, book, DISPATCH_SHARE)
    backward = call.phase == "backward"
    share = 1.0
    if event.startswith("fsdp_layer"):
        share = 1 - FORWARD_SHARE if backward else FORWARD_SHARE
    elif event == "pipeline_micro":
        share = 1 - SCHEDULE_SHARE if backward else SCHEDULE_SHARE
    return python_op(event, tensors, book, share)


def _collectives(
    calls: Sequence[OpCall], book: PriceBook, node: Node | None, per_node: int
) -> list[PricedOp]:
    """Collectives with durations; equal groups of ranks share a price."""
    ranks = {_axis(call): _ranks(call) for call in calls}
    where = cluster_of(ranks, book.gpu, node, per_node)
    messages = [
        Message(
            kind=SAME_AS.get(call.kwargs["kind"], call.kwargs["kind"]),
            axis=_axis(call),
            message_bytes=max(1, call.kwargs["bytes"]),
            dtype=call.args[0].dtype,
        )
        for call in calls
    ]
    return price_messages(messages, book, where)


def _ranks(call: OpCall) -> tuple[int, ...]:
    """The ranks of a collective, or the two of a message."""
    facts = call.kwargs
    return (facts["rank"], facts["peer"]) if facts["peer"] >= 0 else tuple(facts["ranks"])


def _axis(call: OpCall) -> str:
    return ",".join(map(str, _ranks(call)))


def cluster_of(
    ranks: Mapping[str, tuple[int, ...]], gpu: Gpu, node: Node | None, per_node: int
) -> Cluster:
    """Named groups of ranks on nodes that are filled one after the other."""
    groups = {
        name: Group(size=len(among), per_node=max(Counter(r // per_node for r in among).values()))
        for name, among in ranks.items()
    }
    return Cluster(gpu=gpu, node=node, gpus_per_node=per_node, groups=groups)
