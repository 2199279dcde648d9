"""LAMB (arXiv:1904.00962) as a torch optimizer with fused kernels, as apex's FusedLAMB has them.

A step is four calls over all tensors: one reads parameters, gradients and moments, writes moments
and leaves the update in place of the gradients; two are norms, of parameters and of updates; one
reads both and writes the parameters. Gradients are not clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BETAS, EPS, DECAY = (0.9, 0.999), 1e-6, 0.01


@torch.library.custom_op(
    "itercast::_fused_lamb_update_", mutates_args=("grads", "means", "squares")
)
def lamb_update_(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor], step: int
) -> None:
    """Advance Adam's moments and write the update in place of the gradients."""
    for p, g, m, v in zip(params, grads, means, squares, strict=True):
        m.lerp_(g, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        mean, square = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
        g.copy_(mean / (square.sqrt() + EPS) + DECAY * p)


@torch.library.custom_op("itercast::_fused_lamb_apply_", mutates_args=("params",))
def lamb_apply_(
    params: list[Tensor],
    updates: list[Tensor],
    param_norms: list[Tensor],
    update_norms: list[Tensor],
    rate: float,
) -> None:
    """Move each tensor by its update, scaled to ``rate`` times the tensor's norm (trust ratio)."""
    for p, u, size, length in zip(params, updates, param_norms, update_norms, strict=True):
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        p.sub_(rate * trust * u)


@lamb_update_.register_fake
def _(*args: Any) -> None:
    """Nothing is returned."""


@lamb_apply_.register_fake
def _(*args: Any) -> None:
    """Nothing is returned."""


class Lamb(torch.optim.Optimizer):
    """LAMB with decay and bias correction; its state is Adam's, two tensors per parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; the gradients are overwritten."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p not in self.state:
                    self.state[p] = {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                self.state[p]["step"] += 1
            if not params:
                continue
            grads = [p.grad for p in params]
            means, squares = ([self.state[p][name] for p in params] for name in "mv")
            lamb_update_(params, grads, means, squares, self.state[params[0]]["step"])
            norms = torch._foreach_norm(params), torch._foreach_norm(grads)
            lamb_apply_(params, grads, *norms, group["lr"])
