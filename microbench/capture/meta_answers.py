"""What torch tells wrongly or not at all without data: shapes, strides, sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def answered(name: str, args: tuple[Any, ...]) -> Any:
    """What an aten op returns, as fake tensors; None for an op that torch itself answers."""
    return ANSWERS[name](*args) if name in ANSWERS else None


def _by_expert(a: Any, b: Any, ends: Any, *rest: Any) -> Any:
    """The product of each expert's tokens and weights, or of both to a stack of gradients.

    Torch answers in bf16 only.
    """
    stack = (len(ends),) if b.dim() == 2 else ()
    return a.new_empty((*stack, a.shape[0], b.shape[-1]))


def _ctc_loss(log_probs: Any, labels: Any, *rest: Any) -> Any:
    """A loss by sample and the alphas; every sample has as many labels as the longest."""
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = labels.shape[1] if labels.dim() == 2 else labels.numel() // batch
    alphas = log_probs.new_empty((batch, steps, 2 * longest + 1))
    return log_probs.new_empty((batch,)), alphas


def _bag_gradient(grad: Any, index: Any, *facts: Any) -> Any:
    """Of a sparse table: a row of the bag's gradient for each lookup; torch says there is none."""
    _offsets, _bag_of, _sizes, _largest, rows, _by_frequency, _mode, sparse, *_ = facts
    if not sparse:
        return None
    values = grad.new_empty((index.numel(), grad.shape[-1]))
    return _sparse(index.view(1, -1), values, (rows, grad.shape[-1]))


def _clone(tensor: Any) -> Any:
    """Of sparse tensors: torch forgets how many rows they hold."""
    if not is_sparse(tensor):
        return None
    return _sparse(tensor._indices(), torch.empty_like(tensor._values()), tensor.shape)


def _add_in_place(tensor: Any, other: Any, *rest: Any) -> Any:
    """Of sparse tensors to plain ones: torch would add zeros to zeros of that size."""
    return tensor if is_sparse(other) and not is_sparse(tensor) else None


def _layer_norm_gradients(grad: Any, x: Any, *rest: Any) -> Any:
    """In the order of memory of a plain tensor; torch says in that of the input."""
    *_, weight, bias, wanted = rest
    leaves = zip((x, weight, bias), wanted, strict=True)
    return tuple(t.new_empty(t.shape) if want else None for t, want in leaves)


def _sparse(indices: Any, values: Any, size: Any) -> Any:
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False)


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "_grouped_mm": _by_expert,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": lambda grad, log_probs, *rest: torch.empty_like(log_probs),
    "_embedding_bag_backward": _bag_gradient,
    "add_": _add_in_place,
    "clone": _clone,
    "native_layer_norm_backward": _layer_norm_gradients,
}


def without_sparse(op: str, args: Any, outputs: Any) -> tuple[str, Any, Any]:
    """A call on sparse gradients as one on the rows they hold.

    The gradient of a bag is taken apart by lookup, and added to rows of the table. Other ops are
    marked as sparse, for which there are no families.
    """
    if op == "aten._embedding_bag_backward.default" and is_sparse(outputs[0]):
        op, args = "aten.index_select.default", (args[0], 0, args[1])
    elif op == "aten.add_.Tensor" and is_sparse(args[1]):
        op, args = "aten.index_add_.default", (args[0], 0, args[1]._indices()[0], args[1]._values())
    elif op != "aten.clone.default":
        op = op.replace("aten.", "aten.sparse_", 1)  # another kernel than that of dense tensors
    return op, tuple(map(_rows, args)), tuple(map(_rows, outputs))


def is_sparse(value: Any) -> bool:
    """Whether this is a tensor that holds some of its rows only."""
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def _rows(value: Any) -> Any:
    return value._values() if is_sparse(value) else value
