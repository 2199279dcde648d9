"""Which products of a model tensor parallelism cuts, found by following data.

A product with a weight whose result reaches another such product
without a norm or a residual sum between is cut by columns, the other by rows. What lies between
(attention, activations, norms of each head) works on a part of the heads or columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compose.graph.rewrite import changed
from microbench.opcall import OpCall, StepCapture, TensorSpec

PRODUCTS = ("aten.mm.default", "aten.addmm.default")
STOPS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "mean", "_log_softmax")
CAST = "aten._to_copy.default"
REACH = 400  # calls to follow


def casts_as_weights(capture: StepCapture) -> StepCapture:
    """The step with what autocast makes of a weight in that weight's storage: as good as it."""
    weights = {p.storage for p in capture.parameters}
    same = {
        c.outputs[0].storage: c.args[0].storage
        for c in capture.calls
        if c.op == CAST and c.args[0].storage in weights
    }

    def named(call: OpCall) -> OpCall:
        tensors = {*call.tensors(), *call.outputs}
        change = {t: replace(t, storage=same[t.storage]) for t in tensors if t.storage in same}
        return changed(call, change) if change else call

    return replace(capture, calls=tuple(map(named, capture.calls))) if same else capture


def roles(capture: StepCapture) -> dict[int, str]:
    """Storages of weights that are cut: column, row or vocabulary."""
    weights = {p.storage for p in capture.parameters if len(p.shape) == 2}
    found: dict[int, str] = {}
    forward = [c for c in capture.calls if c.phase in ("forward", "loss")]
    made = {t.storage for c in forward for t in c.outputs}
    for i, call in enumerate(forward):
        weight = _weight(call, weights)
        if weight is None or found.get(weight.storage) == "row":
            continue
        partner = _partner(forward[i + 1 :], call.outputs[0], weights, made)
        if partner == "loss":
            found[weight.storage] = "vocabulary"
        elif isinstance(partner, int) and partner not in found:
            found[weight.storage] = "column"
            found[partner] = "row"
        elif isinstance(partner, int) and found[partner] == "row":
            found[weight.storage] = "column"
    heads = {p.shape for p in capture.parameters if found.get(p.storage) == "vocabulary"}
    found |= {p.storage: "vocabulary" for p in capture.parameters if p.shape in heads}
    return found


def _weight(call: OpCall, weights: set[int]) -> TensorSpec | None:
    """The weight of a product, its second factor."""
    if call.op not in PRODUCTS:
        return None
    second = call.args[-1]
    return second if second.storage in weights else None


def _partner(
    calls: Sequence[OpCall], start: TensorSpec, weights: set[int], made: set[int]
) -> int | str | None:
    """The weight that first multiplies what came of ``start``; "loss" if that or nobody does.

    Megatron's heads are cut by vocabulary whether or not a loss follows. A norm of fewer elements
    than ``start`` has columns is one of each head.
    """
    follows = {start.storage}
    for call in calls[:REACH]:
        tensors = call.tensors()
        mine = [t for t in tensors if t.storage in follows]
        if not mine:
            continue
        weight = _weight(call, weights)
        if weight is not None:
            return weight.storage
        name = call.op.split(".")[1]
        if name == "_log_softmax":
            return "loss"
        others = [t for t in tensors if t.storage in made and t.storage not in follows]
        residual = name in ("add", "add_") and any(t.numel == mine[0].numel for t in others)
        if residual or (name in STOPS and mine[0].shape[-1] >= start.shape[-1]):
            return None
        follows |= {t.storage for t in call.outputs}
    return "loss" if len(calls) <= REACH else None
