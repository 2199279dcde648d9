"""Results of ops that torch computes wrongly, or not at all, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from itercast.microbench.opcall import Args, Argument


def corrected_result(name: str, args: Args) -> Argument:
    """The fake result of an aten op, given without ``aten::``; None where torch's own is right."""
    return RESULTS[name](*args) if name in RESULTS else None


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *rest: Argument) -> Tensor:
    """The products of each expert's tokens and weights, or the stack of weight gradients.

    Torch supports fake tensors in bf16 only.
    """
    stack = (len(ends),) if b.dim() == 2 else ()
    return a.new_empty((*stack, a.shape[0], b.shape[-1]))


def _ctc_loss(log_probs: Tensor, labels: Tensor, *rest: Argument) -> Argument:
    """One loss per sample, and the forward variables (alphas) of shape (batch, steps, 2 * L + 1).

    L is the longest label sequence; all samples are taken to be that long.
    """
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = labels.shape[1] if labels.dim() == 2 else labels.numel() // batch
    alphas = log_probs.new_empty((batch, steps, 2 * longest + 1))
    return log_probs.new_empty((batch,)), alphas


def _layer_norm_gradients(grad: Tensor, x: Tensor, *rest: Argument) -> Argument:
    """Contiguous gradients, as the CPU kernel makes them; torch copies the strides of the input."""
    *_, weight, bias, wanted = rest
    leaves = zip((x, weight, bias), wanted, strict=True)
    return tuple(t.new_empty(t.shape) if want else None for t, want in leaves)


RESULTS: Mapping[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_mm,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": lambda grad, log_probs, *rest: torch.empty_like(log_probs),
    "native_layer_norm_backward": _layer_norm_gradients,
}
