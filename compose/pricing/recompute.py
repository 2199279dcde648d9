"""Recomputation of activations: the forward ops that backward runs again, and what is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from itercast.compose.graph.layers import Layer
from itercast.compose.pricing.host import python_op
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import PricedOp
from itercast.microbench.hardware.stack import WHOLE, stack_of_row
from itercast.microbench.opcall import StepCapture

ATTENTION = ("itercast.sdpa", "aten.bmm.default", "aten._softmax.default", "aten.baddbmm.default")


def recomputed(
    layer: Layer,
    capture: StepCapture,
    ops: Mapping[int, PricedOp],
    what: str,
    book: PriceBook,
) -> tuple[list[PricedOp], int]:
    """Ops of forward that backward runs again first, and the bytes that forward still saves.

    ``what``: the whole layer ("full"), or its attention ("selective", arXiv:2205.05198).
    """
    if what == "full":
        span, saved = _whole(layer, capture, book.stack), layer.output_bytes
    else:
        span, saved = _attention(layer, capture)
    again = [replace(ops[i], leads=0.0) for i in span]
    if again:
        again.insert(0, python_op("checkpoint_layer", _saved(layer, capture), book))
    return again, saved


def _whole(layer: Layer, capture: StepCapture, stack: str) -> Sequence[int]:
    """From the layer's input up to the last result that its backward reads, or all of it.

    torch.utils.checkpoint of torch 2.1 and later stops there; older stacks run the whole layer.
    """
    a, b = layer.forward
    if stack_of_row(stack).recomputes == WHOLE:
        return range(a, b)
    read = {t.storage for c in capture.calls[slice(*layer.backward)] for t in c.tensors()}
    results = ((i, t) for i in range(a, b) for t in capture.calls[i].outputs)
    return range(a, max((i + 1 for i, t in results if t.storage in read), default=a))


def _attention(layer: Layer, capture: StepCapture) -> tuple[Sequence[int], int]:
    """The calls from the first of attention to the last without weights, and what stays saved."""
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


def _saved(layer: Layer, capture: StepCapture) -> int:
    """How many tensors autograd saves of a layer: those of forward that backward's calls read."""
    forward = capture.calls[slice(*layer.forward)]
    there = {t.storage for c in forward for t in (*c.tensors(), *c.outputs)}
    backward = capture.calls[slice(*layer.backward)]
    return max(1, sum(t.storage in there for c in backward for t in c.tensors()))
