"""LoRA (arXiv:2106.09685) on transformers models, as peft adapts them by default.

All weights are frozen. Beside each adapted layer W x two small ones are trained: B A x, of RANK in
the middle. They are kept in fp32, so where the base is in half precision x is cast before A, and
the sum after B is cast back. No dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from itercast.capture.base.assumptions import assumed

TARGETS: dict[str, list[str]] = assumed(__file__, "targets")


class Adapted(nn.Module):
    """A frozen linear layer W with a trained low-rank adapter: two small layers, A and B."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        inputs, outputs = _sizes(base)
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Returns W x + 2 B A x; 2 is the scale that peft uses by default."""
        y: Tensor = self.base(x)
        beside: Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return (y + 2.0 * beside).to(y.dtype)


def adapt(model: Any, rank: int) -> Any:
    """Freeze a transformers model and adapt the layers that peft takes by default.

    ValueError where no default is known, where the model has no such layers, and where a layer is
    narrower than the adapter.
    """
    kind = str(getattr(model.config, "model_type", ""))
    if kind not in TARGETS:
        raise ValueError(f"lora: no default layers of model type {kind!r}; known: {list(TARGETS)}")
    model.requires_grad_(False)
    found = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in TARGETS[kind]]
    for name in found:
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        width = min(getattr(owner, own).weight.shape)
        if rank > width:
            raise ValueError(
                f"lora {rank}: {name} has a width of {width}, allowed are ranks up to it"
            )
        setattr(owner, own, Adapted(getattr(owner, own), rank))
    if not found:
        raise ValueError(f"lora: this {kind!r} has no layers named {', '.join(TARGETS[kind])}")
    return model


def _sizes(base: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, or of GPT-2's, whose weight is transposed."""
    one, other = base.weight.shape
    return (other, one) if isinstance(base, nn.Linear) else (one, other)
