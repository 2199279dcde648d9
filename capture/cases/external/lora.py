"""LoRA (arXiv:2106.09685) on transformers models, as peft adapts them.

All weights are frozen. Beside each adapted layer W x two small ones are trained: B A x, of RANK in
the middle. peft keeps them in fp32, so where the base is in half precision x is cast before A, and
the sum after B is cast back. No dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from itercast.capture.base.assumptions import assumed
from itercast.capture.cases.external.adapters import ALL_LINEAR, Adapters
from itercast.capture.opcall import torch_dtype

TARGETS: dict[str, list[str]] = assumed(__file__, "targets")


class Adapted(nn.Module):
    """A frozen linear layer W with a trained low-rank adapter: two small layers, A and B."""

    def __init__(self, base: Any, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        inputs, outputs = _sizes(base)
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns W x + 2 B A x; 2 is the scale that peft uses by default."""
        y: Tensor = self.base(x)
        low_rank: Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return (y + 2.0 * low_rank).to(y.dtype)


def adapt(model: Any, adapters: Adapters) -> Any:
    """Freeze a transformers model and adapt the layers that are named, or that peft takes.

    ValueError where peft knows no default, where the model has no such layers, and where a layer is
    narrower than the adapter.
    """
    names = _adapted(model, adapters)
    model.requires_grad_(False)
    for name in names:
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        width = min(getattr(owner, own).weight.shape)
        if adapters.rank > width:
            raise ValueError(
                f"lora {adapters.rank}: {name} has a width of {width}, allowed are ranks up to it"
            )
        dtype = torch_dtype(adapters.dtype)
        setattr(owner, own, Adapted(getattr(owner, own), adapters.rank, dtype))
    return model


def _adapted(model: Any, adapters: Adapters) -> list[str]:
    """Names of the modules that get an adapter."""
    kind = str(getattr(model.config, "model_type", ""))
    modules = model.named_modules()  # GPT-2's linear layers are of transformers' class Conv1D
    linear = [
        name for name, m in modules if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    ]
    layers = list(adapters.layers or TARGETS.get(kind, ()))
    if not layers:
        raise ValueError(
            f"lora: no default layers of model type {kind!r}; known: {list(TARGETS)}. "
            f"Others are named: rank={adapters.rank},layers={ALL_LINEAR}"
        )
    if ALL_LINEAR in layers:
        head = model.get_output_embeddings()
        adapted = [name for name in linear if model.get_submodule(name) is not head]
    else:
        adapted = [name for name in linear if name.rpartition(".")[2] in layers]
    last_parts = {name.rpartition(".")[2] for name in adapted}
    if missing := [name for name in layers if name not in last_parts | {ALL_LINEAR}]:
        linear_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        problem = f"this {kind!r} has no linear layers named {missing[0]!r}"
        raise ValueError(f"lora: {problem}; it has {linear_names}")
    return adapted


def _sizes(base: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, or of GPT-2's, whose weight is transposed."""
    first, second = base.weight.shape
    return (second, first) if isinstance(base, nn.Linear) else (first, second)
