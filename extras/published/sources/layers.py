"""Single layers that others timed, as small torch modules: priced as the ops they consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itercast.capture.opcall import torch_dtype


def rms(x: Tensor, scale: Tensor) -> Tensor:
    """The RMS norm of Hugging Face's models: computed in fp32, cast back, then scaled."""
    wide = x.float()
    return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of all heads of one tensor, as Hugging Face's models write it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.detach() + torch.cat((-second, first), dim=-1) * sin.detach()


def gated(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An MLP of three linear layers, whose gate has this activation."""

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)

    return mlp


def cross_entropy(logits: Tensor) -> Tensor:
    """Mean loss over rows; class 0 is right everywhere."""
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


def expert_loop(
    x: Tensor, scores: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A mixture of experts with stacked weights, whose experts run one after the other.

    As Hugging Face's eager models: whoever indexes by a number that is on the GPU waits for it. In
    backward each expert's gradient is as large as all weights together, and all are added up.
    """
    index = scores.detach().topk(weights.shape[1]).indices
    chosen = F.one_hot(index, len(down)).permute(2, 1, 0)
    found = torch.zeros_like(x)
    for (expert,) in chosen.sum((-1, -2)).gt(0).nonzero():
        place, token = torch.where(chosen[expert])
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[expert]) * weights[token, place, None]
        found.index_add_(0, token, out)
    return found


# By name: the function, and the shapes of its tensors in letters: n rows, c columns, i inner width,
# j twice that, e experts, k experts of a token. In capitals: in fp32 whatever the others are in, as
# Liger's scripts make the weights of RMS norms, whose results are then in fp32.
LAYERS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "cross_entropy": (cross_entropy, "nc"),
    "wide_cross_entropy": (lambda x: cross_entropy(x.float()), "nc"),
    "linear_cross_entropy": (lambda x, w: cross_entropy(F.linear(x, w)), "nc ic"),
    "rms_norm": (rms, "nc C"),
    "add_rms_norm": (lambda x, y, w: rms(x + y, w), "nc nc C"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), "nc c c"),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), "nc c c"),
    "group_norm": (lambda x, w, b: F.group_norm(x[..., None], 8, w, b), "nc c c"),
    "rope": (rotary, "nc nc nc"),  # queries and keys in one tensor
    "rope_apart": (lambda q, k, *by: (rotary(q, *by[:2]), rotary(k, *by[2:])), "nc ni nc nc ni ni"),
    "swiglu": (lambda x, y: F.silu(x) * y, "nc nc"),
    "relu_squared": (lambda x: F.relu(x).square(), "nc"),
    "tvd": (lambda x, y: 0.5 * (x - y.detach()).abs().sum(-1).mean(), "nc nc"),
    "swiglu_mlp": (gated(F.silu), "nc ic ic ci"),
    "geglu_mlp": (gated(F.gelu), "nc ic ic ci"),
    "expert_loop": (expert_loop, "nc ne nk ejc eci"),
}


class Layer(nn.Module):
    """A layer with its inputs as parameters: a backward pass also makes the inputs' gradients."""

    def __init__(self, call: Callable[..., Any], tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.call = call
        self.tensors = nn.ParameterList(tensors)

    def forward(self) -> Any:
        """The layer's output."""
        return self.call(*self.tensors)


def layer(
    name: str, dtype: str, rows: int, cols: int, inner: int = 0, experts: int = 0, topk: int = 0
) -> Layer:
    """A layer of these sizes on the meta device. ValueError for an unknown name."""
    if name not in LAYERS:
        raise ValueError(f"unknown layer {name!r}; known: {sorted(LAYERS)}")
    call, shapes = LAYERS[name]
    sizes = {"n": rows, "c": cols, "i": inner, "j": 2 * inner, "e": experts, "k": topk}

    def made(shape: str) -> Tensor:
        known = torch.float32 if shape.isupper() else torch_dtype(dtype)
        return torch.empty([sizes[one] for one in shape.lower()], dtype=known, device="meta")

    return Layer(call, map(made, shapes.split()))
