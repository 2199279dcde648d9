"""Ops that torch computes wrongly, or not at all, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from itercast.capture.opcall import Argument


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


def trilinear(
    log: Any,
    *args: Any,
    expand: Sequence[Sequence[int]],
    sumdim: Sequence[int],
    along: Sequence[int],
) -> Tensor:
    """Run and log the ops of torch's ``_trilinear`` of three tensors, which ``nn.Bilinear`` calls.

    For each index of the unrolled axis: the product of the first two tensors, of that with the
    third, and their sum. Source: aten/src/ATen/native/Linear.cpp. On fake tensors one index runs,
    and its calls are logged for all.
    """
    unroll_dim = along[0] if along else 1
    with log:
        whole = [_with_axes(t, new) for t, new in zip(args, expand, strict=True)]
        sizes = [max(lengths) for lengths in zip(*(t.shape for t in whole), strict=True)]
        axes = [i for i in range(len(sizes)) if i != unroll_dim]
        both = [i for i in axes if i not in sumdim or i not in expand[2]]
        kept = [i for i in axes if i not in sumdim]
        shape = [1 if i in sumdim else n for i, n in enumerate(sizes)]
        output, times = whole[0].new_zeros(shape), sizes[unroll_dim]
        for index in range(times):
            begun = len(log.calls)
            x, y, z, to = (
                t.select(unroll_dim, min(index, t.shape[unroll_dim] - 1)) for t in (*whole, output)
            )
            product = torch.einsum(torch.einsum(x, axes, y, axes, both), both, z, axes, kept)
            to.add_(product.view(to.shape))
            if isinstance(output, FakeTensor):
                log.calls += (times - 1) * log.calls[begun:]
                break
        return output.squeeze(tuple(sumdim))


def _with_axes(tensor: Tensor, new: Sequence[int]) -> Tensor:
    """The tensor with new axes of length 1 at these places."""
    for axis in sorted(new):
        tensor = tensor.unsqueeze(axis)
    return tensor


CORRECTED: Mapping[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_mm,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": lambda grad, log_probs, *rest: torch.empty_like(log_probs),
    "native_layer_norm_backward": _layer_norm_gradients,
}
