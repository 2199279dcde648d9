"""Finds LoRA's adapters: low-rank products B A x whose result is added to that of a layer W x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from itercast.microbench.opcall import OpCall, TensorSpec

PRODUCTS = ("aten.mm.default", "aten.addmm.default")
# Between the products of an adapter, and before its sum.
PASSED = ("_to_copy", "clone", "native_dropout", "mul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Weights of an adapted layer and of its adapter, by storage.

    ``calls``: numbers of the adapter's two products, and of the sum, which reads ``result`` of W.
    """

    base: int
    down: int  # A
    up: int  # B
    calls: tuple[int, int, int]
    result: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    number: int
    read: int  # storage of what it multiplies, before casts
    weight: int
    made: TensorSpec


def find_adapters(calls: Sequence[OpCall], weights: set[int]) -> Iterator[Adapter]:
    """Yields the adapters among the calls of a forward pass."""
    makers = {t.storage: c for c in calls for t in c.outputs}
    products = {
        c.outputs[0].storage: _Product(
            number=i, read=_root(c.args[-2], makers), weight=c.args[-1].storage, made=c.outputs[0]
        )
        for i, c in enumerate(calls)
        if c.op in PRODUCTS and c.args[-1].storage in weights
    }
    for i, call in enumerate(calls):
        terms = call.tensors()
        if call.op.split(".")[1] not in ("add", "add_") or len(terms) != 2:
            continue
        for result, beside in (terms, terms[::-1]):
            base, up = (products.get(_root(t, makers)) for t in (result, beside))
            down = products.get(up.read) if up is not None else None
            if base is None or up is None or down is None or base.read != down.read:
                continue
            if down.made.shape[-1] < min(up.made.shape[-1], _columns(calls[down.number])):
                yield Adapter(
                    base=base.weight,
                    down=down.weight,
                    up=up.weight,
                    calls=(down.number, up.number, i),
                    result=result,
                )


def without_adapters(calls: Sequence[OpCall], adapters: Sequence[Adapter]) -> list[OpCall]:
    """The calls without the adapters' products; their sums read the results of layers alone."""
    gone = {i for x in adapters for i in x.calls[:2]}
    sums = {x.calls[2]: x.result for x in adapters}
    return [
        replace(call, args=(sums[i],)) if i in sums else call
        for i, call in enumerate(calls)
        if i not in gone
    ]


def _columns(product: OpCall) -> int:
    return int(product.args[-2].shape[-1])


def _root(t: TensorSpec, makers: dict[int, OpCall]) -> int:
    """The storage of which ``t`` is a copy, scaled or in another dtype."""
    storage = t.storage
    while (call := makers.get(storage)) is not None and call.op.split(".")[1] in PASSED:
        source = call.tensors()[0].storage
        if source == storage:
            break
        storage = source
    return storage
