"""Messages of async tensor parallelism: they are sent in parts beside the parts of a product.

Torch's compiler does that (``torch._inductor.config._micro_pipeline_tp``) where a product reads
what is gathered as its first operand, or makes what is scattered.
Source: torch/_inductor/fx_passes/micro_pipeline_tp.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from itercast.capture.opcall import OpCall
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.rank_graph import partly_hidden

BETWEEN = ("aten.cat.default", "aten.clone.default")  # a message and a product: another layout


def products_beside(calls: Sequence[OpCall]) -> dict[int, list[int]]:
    """For what each such message brings the results of the products beside it, by storages."""
    readers, writers = defaultdict[int, list[int]](list), dict[int, int]()
    for i, call in enumerate(calls):
        for storage in _read(call):
            readers[storage].append(i)
    found = dict[int, list[int]]()
    for i, call in enumerate(calls):
        if call.kwargs.get("in_parts"):
            gathers = call.kwargs["kind"] == "all_gather"
            beside = _reading(i, calls, readers) if gathers else _making(i, calls, writers)
            found[call.outputs[0].storage] = [calls[j].outputs[0].storage for j in beside]
        writers |= dict.fromkeys({t.storage for t in call.outputs} - _read(call), i)  # no views
    return found


def _read(call: OpCall) -> set[int]:
    return {t.storage for t in call.tensors()}


def _reading(i: int, calls: Sequence[OpCall], readers: Mapping[int, list[int]]) -> Iterator[int]:
    """The products whose rows are what message ``i`` gathers."""
    waiting = [t.storage for t in calls[i].outputs]
    while waiting:
        storage = waiting.pop()
        for j in readers[storage]:
            call = calls[j]
            if j < i or call.phase != calls[i].phase:
                continue
            if call.op in LINEAR_PRODUCTS:
                first = call.args[-2]
                if first.storage == storage and first.stride[-1] == 1:
                    yield j
            elif call.op in BETWEEN:
                waiting += [t.storage for t in call.outputs]


def _making(i: int, calls: Sequence[OpCall], writers: Mapping[int, int]) -> Iterator[int]:
    """The product whose result message ``i`` scatters."""
    at = writers.get(calls[i].tensors()[0].storage)
    while at is not None and calls[at].op in BETWEEN:
        at = writers.get(calls[at].tensors()[0].storage)
    if at is not None and calls[at].op in LINEAR_PRODUCTS:
        yield at


def sent_in_parts(
    calls: Sequence[OpCall],
    ops: Mapping[int, PricedOp],
    beside: Mapping[int, Sequence[int]],
    book: PriceBook,
) -> dict[int, PricedOp]:
    """Such messages by call, as long as what their products do not hide.

    Of n ranks' parts one is there from the start, or is computed before any is sent.
    """
    made = {c.outputs[0].storage: i for i, c in enumerate(calls) if c.op in LINEAR_PRODUCTS}
    found = dict[int, PricedOp]()
    for i, call in enumerate(calls):
        if call.kwargs.get("in_parts"):
            ranks = len(call.kwargs["ranks"])
            known = (made[s] for s in beside[call.outputs[0].storage] if s in made)
            products = [ops[j] for j in known]
            found[i] = partly_hidden(ops[i], (ranks - 1) / ranks, products, book)
    return found
