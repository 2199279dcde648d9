"""Which elements of a step's tensors are zero: gradients of tables, and what Adam keeps of them.

Square roots of zeros take some CPUs ten times as long as others. Indices are taken as drawn
uniformly, and every step as seeing the same batch: rows of a table that one batch leaves out stay
zero. In a long run over new batches fewer stay so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from microbench.opcall import OpCall, TensorSpec

# where the indices stand among the arguments of an op that makes a table's gradient
TABLE_GRADIENTS = {
    "aten.embedding_dense_backward.default": 1,
    "aten._embedding_bag_backward.default": 1,
    "aten._embedding_bag_dense_backward.default": 1,
}
KEEPS = ("_foreach_mul_", "_foreach_sqrt")  # what they write has zeros where it had them


def mark_zeros(calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
    """The calls with ``zero_frac`` set on the tensors of every ``_foreach_sqrt``."""
    zeros: dict[int, float] = {}
    return tuple(_marked(call, zeros) for call in calls)


def untouched_frac(rows: int, lookups: int) -> float:
    """Expected share of a table's rows that no lookup draws: (1 - 1/rows)^lookups."""
    return float((1 - 1 / rows) ** lookups)


def _marked(call: OpCall, zeros: dict[int, float]) -> OpCall:
    """Notes zeros of what the call writes, by storage; sets them where they are asked for."""
    name = call.op.split(".")[1]
    if call.op in TABLE_GRADIENTS:
        lookups, table = call.args[TABLE_GRADIENTS[call.op]].numel, call.outputs[0]
        zeros[table.storage] = untouched_frac(table.shape[0], lookups)
    elif name == "_foreach_addcmul_":  # squares += gradient * gradient
        for square, gradient in zip(call.args[0], call.args[1], strict=True):
            zeros[square.storage] = zeros.get(gradient.storage, 0.0)
    elif name == "_foreach_sqrt":
        return replace(call, args=(_with_zeros(call.args[0], zeros), *call.args[1:]))
    elif call.op == "aten.add_.Tensor" and isinstance(call.args[1], TensorSpec):
        summed, other = call.args[:2]  # tied weights: zero where both parts are
        zeros[summed.storage] = zeros.get(summed.storage, 0.0) * zeros.get(other.storage, 0.0)
    elif name not in KEEPS:
        for output in call.outputs:
            zeros.pop(output.storage, None)
    return call


def _with_zeros(tensors: Any, zeros: dict[int, float]) -> tuple[TensorSpec, ...]:
    return tuple(replace(t, zero_frac=zeros.get(t.storage, 0.0)) for t in tensors)
