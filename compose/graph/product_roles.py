"""Finds which weights tensor parallelism cuts, and how, by following data from product to product.

A linear layer whose result reaches another one without a norm of the whole width or a residual sum
between them is cut by columns (its outputs), the other one by rows (its inputs), as in Megatron-LM
(arXiv:1909.08053). Calls between the two work on a shard of the heads or columns: attention,
activations, norms of each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compose.graph.rewrite import with_tensors
from microbench.opcall import OpCall, StepCapture, TensorSpec

LINEAR_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
DTYPE_CAST = "aten._to_copy.default"
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "mean", "_log_softmax")


def alias_weight_casts(capture: StepCapture) -> StepCapture:
    """Gives autocast's copy of a weight the storage of the weight, so that both count as one."""
    weights = {p.storage for p in capture.parameters}
    weight_of = {
        c.outputs[0].storage: c.args[0].storage
        for c in capture.calls
        if c.op == DTYPE_CAST and c.args[0].storage in weights
    }
    if not weight_of:
        return capture

    def aliased(call: OpCall) -> OpCall:
        tensors = {*call.tensors(), *call.outputs}
        change = {
            t: replace(t, storage=weight_of[t.storage]) for t in tensors if t.storage in weight_of
        }
        return with_tensors(call, change) if change else call

    return replace(capture, calls=tuple(map(aliased, capture.calls)))


def weight_roles(capture: StepCapture) -> dict[int, str]:
    """Returns the storages of weights to cut, each with "column", "row" or "vocabulary"."""
    weights = {p.storage for p in capture.parameters if len(p.shape) == 2}
    roles: dict[int, str] = {}
    forward = [c for c in capture.calls if c.phase in ("forward", "loss")]
    made = {t.storage for c in forward for t in c.outputs}
    for i, call in enumerate(forward):
        weight = _weight(call, weights)
        if weight is None or roles.get(weight.storage) == "row":
            continue
        partner = _partner(forward[i + 1 :], call.outputs[0], weights, made)
        if partner == "loss":
            roles[weight.storage] = "vocabulary"
        elif isinstance(partner, int) and partner not in roles:
            roles[weight.storage] = "column"
            roles[partner] = "row"
        elif isinstance(partner, int) and roles[partner] == "row":
            roles[weight.storage] = "column"
    heads = {p.shape for p in capture.parameters if roles.get(p.storage) == "vocabulary"}
    roles |= {p.storage: "vocabulary" for p in capture.parameters if p.shape in heads}
    return roles


def _weight(call: OpCall, weights: set[int]) -> TensorSpec | None:
    """The weight of a linear layer's product, its second factor; None for other calls."""
    if call.op not in LINEAR_PRODUCTS:
        return None
    second = call.args[-1]
    return second if second.storage in weights else None


def _partner(
    calls: Sequence[OpCall], start: TensorSpec, weights: set[int], made: set[int]
) -> int | str | None:
    """Returns the storage of the first weight that multiplies data computed from ``start``.

    "loss" where the data reach the loss or the end of the step first: heads are cut by vocabulary
    with and without a loss, as in Megatron-LM. None where a residual sum or a norm over at least as
    many columns as ``start`` has comes first; a norm over fewer columns is one of each head.
    """
    derived = {start.storage}
    for call in calls:
        tensors = call.tensors()
        inputs = [t for t in tensors if t.storage in derived]
        if not inputs:
            continue
        weight = _weight(call, weights)
        if weight is not None:
            return weight.storage
        name = call.op.split(".")[1]
        if name == "_log_softmax":
            return "loss"
        others = [t for t in tensors if t.storage in made and t.storage not in derived]
        residual = name in ("add", "add_") and any(t.numel == inputs[0].numel for t in others)
        if residual or (name in NORMS and inputs[0].shape[-1] >= start.shape[-1]):
            return None
        derived |= {t.storage for t in call.outputs}
    return "loss"
