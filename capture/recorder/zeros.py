"""Computes which share of embedding gradients, and of Adam's second moments, is zero.

Some CPUs take ten times as long for square roots of zeros as for others. Convention: indices are
uniform, and every step sees the same batch, so that rows a batch does not look up stay zero. In a
long run over new batches fewer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall, TensorSpec

# Ops that make the gradient of a table: the position of the indices among their arguments.
TABLE_GRADIENTS = {
    "aten.embedding_dense_backward.default": 1,
    "aten._embedding_bag_backward.default": 1,
    "aten._embedding_bag_dense_backward.default": 1,
}
KEEPS_ZEROS = ("_foreach_mul_", "_foreach_sqrt")  # outputs are zero where inputs were


def mark_zeros(calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
    """The calls with ``zero_frac`` set on the inputs of every ``_foreach_sqrt``."""
    zeros: dict[int, float] = {}
    return tuple(_marked(call, zeros) for call in calls)


def _marked(call: OpCall, zeros: dict[int, float]) -> OpCall:
    """The call with ``zero_frac`` set; ``zeros`` (by storage) is updated for its outputs."""
    name = call.op.split(".")[1]
    if call.op in TABLE_GRADIENTS:
        lookups, table = call.args[TABLE_GRADIENTS[call.op]].numel, call.outputs[0]
        zeros[table.storage] = (1 - 1 / table.shape[0]) ** lookups  # rows without a lookup
    elif name == "_foreach_addcmul_":  # squares += gradient * gradient
        for square, gradient in zip(call.args[0], call.args[1], strict=True):
            zeros[square.storage] = zeros.get(gradient.storage, 0.0)
    elif name == "_foreach_sqrt":
        marked = (replace(t, zero_frac=zeros.get(t.storage, 0.0)) for t in call.args[0])
        return replace(call, args=(tuple(marked), *call.args[1:]))
    elif call.op == "aten.add_.Tensor" and isinstance(call.args[1], TensorSpec):
        summed, other = call.args[:2]  # tied weights: zero where both parts are
        zeros[summed.storage] = zeros.get(summed.storage, 0.0) * zeros.get(other.storage, 0.0)
    elif name not in KEEPS_ZEROS:
        for output in call.outputs:
            zeros.pop(output.storage, None)
    return call
