"""ZeRO as FSDP2 does it: parameters gathered before each layer, gradients scattered behind it.

- zero=3: gathered in forward and in backward, scattered after every micro-batch;
- zero=2: gathered in forward and kept until the layer's backward is done (reshard_after_forward
  off);
- zero=1: gathered in the first micro-batch, scattered in the last, gradients whole in between.

Numbered layers are sharded one by one, the rest of the model as one, the root, which is gathered
before forward and kept. On a GPU a gather runs one layer ahead and a scatter behind, on the comm
lane; on a CPU there are no streams and torch waits for each where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compose.collectives import Message, price_messages
from compose.host import python_op
from compose.step import PricedLayer
from compose.work import Work

if TYPE_CHECKING:
    from compose.rank import Stretch

FORWARD_SHARE = 0.4  # of the hooks' time, measured 2026-11-21 on two cores with torch 2.13


def sharded_forward(stretch: Stretch, *, gather: bool) -> None:
    """Forward of one micro-batch."""
    layers = stretch.rank.layers
    root = sum(x.layer.parameter_bytes for x in layers if not x.numbered)
    sizes = {root} | {x.layer.parameter_bytes for x in layers if x.numbered}
    kinds = ("all_gather", "reduce_scatter")
    asked = [_message(stretch, kind, n) for kind in kinds for n in sizes if n]
    price_messages(asked, stretch.rank.book, stretch.rank.where)  # one question for all of them
    if root and gather:
        stretch.lanes.wait([_send(stretch, "all_gather", root)])
    markers: list[tuple[int, ...]] = [stretch.lanes.done]
    for k, x in enumerate(layers):
        copies = _gathered(stretch, x, markers[max(0, k - 1)]) if gather else Work()
        python = hooks(stretch, x, FORWARD_SHARE)
        stretch.lanes.work(python.then(copies).then(x.forward_work), x.layer.name)
        markers.append(stretch.lanes.done)


def sharded_backward(stretch: Stretch, *, scatter: bool, later: bool) -> None:
    """Backward of one micro-batch; ``later``: gradients add up to earlier ones."""
    layers, how = list(reversed(stretch.rank.layers)), stretch.how
    markers: list[tuple[int, ...]] = [stretch.lanes.done]
    last: list[int] = []
    for k, x in enumerate(layers):
        work = _gathered(stretch, x, markers[max(0, k - 1)]) if how.regather else Work()
        work = work.then(hooks(stretch, x, 1 - FORWARD_SHARE))
        work = work.then(x.later_work if later and not how.every_micro else x.backward_work)
        if scatter and x.numbered:
            stretch.copies += x.into_bucket
            work = work.then(x.into_work)
        stretch.lanes.work(work, x.layer.name)
        markers.append(stretch.lanes.done)
        if scatter and x.numbered and x.layer.trained_bytes:
            last.append(_send(stretch, "reduce_scatter", x.layer.trained_bytes))
            _block(stretch, last)
    root = sum(x.layer.trained_bytes for x in layers if not x.numbered)
    if scatter and root:
        last.append(_send(stretch, "reduce_scatter", root))
    stretch.lanes.wait(last)


def hooks(stretch: Stretch, x: PricedLayer, share: float) -> Work:
    """The share of a layer's hooks in Python that forward or backward runs."""
    event = "fsdp_layer" if stretch.how.regather else "fsdp_layer_kept"
    if not x.layer.parameters:
        return Work()
    found = python_op(event, len(x.layer.parameters), stretch.rank.book, share)
    stretch.copies.append(found)
    return x.fold([found])


def _gathered(stretch: Stretch, x: PricedLayer, after: tuple[int, ...]) -> Work:
    """Gathers a layer, one ahead of its compute; the copies out of what arrived."""
    if not x.numbered or not x.layer.parameter_bytes:
        return Work()
    on_cpu = stretch.lanes.on_cpu
    sent = _send(stretch, "all_gather", x.layer.parameter_bytes, None if on_cpu else after)
    stretch.lanes.wait([sent])
    stretch.copies += x.out_of_bucket
    return x.out_work


def _block(stretch: Stretch, sent: Sequence[int]) -> None:
    if stretch.lanes.on_cpu:
        stretch.lanes.wait(sent[-1:])


def _send(stretch: Stretch, kind: str, nbytes: int, after: tuple[int, ...] | None = None) -> int:
    return stretch.lanes.send(stretch.price([_message(stretch, kind, nbytes)])[0], after=after)


def _message(stretch: Stretch, kind: str, nbytes: int) -> Message:
    layers = stretch.rank.layers
    dtype = next((p.dtype for x in layers for p in x.layer.parameters), "fp32")
    return Message(kind=kind, axis="shard", message_bytes=nbytes, dtype=dtype)
