"""Recomputation of activations: the forward ops that backward runs again, and what is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.opcall import Places, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.attention_kernels import SDPA
from itercast.compose.graph.layers import Layer
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.rank_graph import RankGraph
from itercast.microbench.hardware.stack import WHOLE, stack_of_row

ATTENTION = (SDPA, "aten.bmm.default", "aten._softmax.default", "aten.baddbmm.default")


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What a layer recomputes: ``ops`` run again in backward, ``forward`` comes before forward.

    ``saved_bytes`` stay between forward and backward. ``kept``: ops whose results a selective
    checkpoint saves.
    """

    ops: tuple[PricedOp, ...] = ()
    forward: tuple[PricedOp, ...] = ()
    saved_bytes: int
    kept: Places = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Calls whose results are saved together or not at all: their bytes, and the time they take."""

    calls: tuple[int, ...]
    nbytes: int
    time_us: float


NOTHING = Item(calls=(), nbytes=0, time_us=0.0)


def recomputed(
    layer: Layer, graph: RankGraph, ops: Mapping[int, PricedOp], plan: ParallelPlan, book: PriceBook
) -> Recomputed:
    """What a layer recomputes under the plan, and the bytes that its forward still saves.

    The plan recomputes the whole layer ("full"), its attention ("selective", arXiv:2205.05198), all
    but attention and every second product ("ops"), or as little as a budget allows ("budget"): a
    share ``plan.recomputed`` of the bytes saved without recomputation.
    """
    kept, capture = NOTHING, graph.capture
    saved = boundary = graph.before_fusion(layer)[1].output_bytes
    if plan.recompute == "selective":
        span, saved = _attention(layer, capture)
    else:
        span = _span_run_again(layer, capture, book.stack)
        if plan.recompute == "budget":
            most_bytes = round(plan.recomputed * layer.saved_bytes) - boundary

            def front() -> Any:  # the least time to run again by bytes saved
                items = _items(layer, span, capture, ops)
                return function_of("checkpoints", "front")(items, layer.saved_bytes - boundary)

            kept = graph.once(("front", layer.forward, book), front).best(most_bytes)
        elif plan.recompute == "ops":
            saves = _saved_ops(span, capture)
            items = (i for i in _items(layer, span, capture, ops) if saves.issuperset(i.calls))
            nbytes = _kept_bytes(*graph.before_fusion(layer))
            kept = replace(reduce(joined, items, kept), nbytes=nbytes)
        saved = boundary + kept.nbytes
    left = (ops[i] for i in sorted({*span} - {*kept.calls}))
    again = [replace(op, leads=0.0) if op.leads else op for op in left]
    if again:
        again.insert(0, python_op("checkpoint_layer", _count_saved(layer, capture), book))
    if kept.calls:
        again.insert(0, _policy_python(span, capture, book))
    return Recomputed(
        ops=tuple(again),
        forward=(_policy_python(range(*layer.forward), capture, book),) if kept.calls else (),
        saved_bytes=saved,
        kept=_places_of(layer, capture, kept.calls),
    )


def _policy_python(calls: Sequence[int], capture: StepCapture, book: PriceBook) -> PricedOp:
    """Python of a selective policy, which sees every call of a pass, also those of views."""
    views = capture.host.get("view_op", 0) / max(1, len(capture.calls))
    return python_op("selective_op", 1, book, len(calls) * (1 + views))


def _saved_ops(span: Sequence[int], capture: StepCapture) -> set[int]:
    """Calls of a layer whose results torchtitan's selective recomputation of ops saves.

    Attention, and the first, third, ... product by a weight, in fp8 too: the policy sees torchao's
    product before it is cast. Sources: https://github.com/pytorch/torchtitan,
    activation_checkpoint.py; logs with fp8 say as much peak memory as with bf16 (its commit
    069bae286, on 8 H100: 47.3 to 47.8 and 47.7 GiB; torchao's README, on 8 B200: 33.4 and 33.7).
    """
    calls = capture.calls
    products = [i for i in span if calls[i].op in LINEAR_PRODUCTS]
    return {*products[::2], *(i for i in span if calls[i].op == SDPA)}


def _kept_bytes(capture: StepCapture, layer: Layer) -> int:
    """Bytes that ``_saved_ops`` keep beside a layer's output."""
    later = _read_later(layer, capture)
    saved = [capture.calls[i] for i in _saved_ops(range(*layer.forward), capture)]
    nbytes_of = {t.storage: t.nbytes for c in saved for t in c.outputs if t.storage not in later}
    return sum(nbytes_of.values())


def _read_later(layer: Layer, capture: StepCapture) -> set[int]:
    """Storages that forward reads after a layer."""
    later = capture.calls[layer.forward[1] :]
    return {t.storage for c in later if c.phase == "forward" for t in c.tensors()}


def joined(a: Item, b: Item) -> Item:
    """Both, saved together."""
    return Item(calls=a.calls + b.calls, nbytes=a.nbytes + b.nbytes, time_us=a.time_us + b.time_us)


def _items(
    layer: Layer, span: Sequence[int], capture: StepCapture, ops: Mapping[int, PricedOp]
) -> list[Item]:
    """The calls of a span whose results a selective checkpoint may save.

    Calls that write in place, or whose results another call writes, are left out: torch refuses
    them. Calls that draw random numbers are saved together or not at all; else the others would
    draw different ones.
    """
    forward = [c for c in capture.calls if c.phase == "forward"]
    writes = Counter(t.storage for c in forward for t in c.outputs)
    later = _read_later(layer, capture)
    items, random_items, random_may_be_saved = list[Item](), list[Item](), True
    for i in span:
        call = capture.calls[i]
        nbytes_of = {t.storage: t.nbytes for t in call.outputs}
        read = {t.storage for t in call.tensors()}
        written_once = all(writes[s] == 1 and s not in read for s in nbytes_of)
        is_random = ops[i].family == "random" or call.kwargs.get("dropout_p", 0.0) > 0
        item = Item(
            calls=(i,),
            nbytes=sum(n for s, n in nbytes_of.items() if s not in later),
            time_us=ops[i].duration_us,
        )
        if is_random:
            random_items.append(item)
            random_may_be_saved = random_may_be_saved and written_once
        elif nbytes_of and written_once and call.op != COLLECTIVE:
            items.append(item)
    if random_items and random_may_be_saved:
        items.append(reduce(joined, random_items))
    return items


def _places_of(layer: Layer, capture: StepCapture, numbers: Sequence[int]) -> Places:
    """Pairs (op of a call, how many calls of that op the layer has before it)."""
    names = [capture.calls[i].op for i in range(*layer.forward)]
    places = sorted(i - layer.forward[0] for i in numbers)
    return tuple((names[place], names[:place].count(names[place])) for place in places)


def _span_run_again(layer: Layer, capture: StepCapture, stack: str) -> Sequence[int]:
    """The calls that run again: up to the last result that the layer's backward reads, or all.

    torch.utils.checkpoint of torch 2.1 and later stops there; older stacks run the whole layer.
    """
    begin, end = layer.forward
    if stack_of_row(stack).recomputes == WHOLE:
        return range(begin, end)
    read = {t.storage for c in capture.calls[slice(*layer.backward)] for t in c.tensors()}
    results = ((i, t) for i in range(begin, end) for t in capture.calls[i].outputs)
    return range(begin, max((i + 1 for i, t in results if t.storage in read), default=begin))


def _attention(layer: Layer, capture: StepCapture) -> tuple[Sequence[int], int]:
    """The calls without weights from the first of attention to its last; bytes that stay saved."""
    chosen = [i for i in range(*layer.forward) if capture.calls[i].op in ATTENTION]
    if not chosen:
        return (), layer.saved_bytes
    weights = {p.storage for p in layer.parameters}
    between = [
        i
        for i in range(chosen[0], chosen[-1] + 1)
        if not any(t.storage in weights for t in capture.calls[i].tensors())
    ]
    dropped = sum(t.nbytes for i in between for t in capture.calls[i].outputs)
    return between, max(layer.output_bytes, layer.saved_bytes - dropped)


def _count_saved(layer: Layer, capture: StepCapture) -> int:
    """How many tensors autograd saves of a layer: results of forward that its backward reads."""
    forward = capture.calls[slice(*layer.forward)]
    there = {t.storage for c in forward for t in c.touched}
    backward = capture.calls[slice(*layer.backward)]
    return max(1, sum(t.storage in there for c in backward for t in c.tensors()))
