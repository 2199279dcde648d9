"""Diffusion transformer (arXiv:2212.09748) as https://github.com/facebookresearch/DiT trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.transformers import rotate
from itercast.capture.step import Inputs

FREQUENCIES = 256  # of a time's sinusoid


class DitBlock(nn.Module):
    """Attention and an MLP, each between a shift, a scale and a gate that the condition gives."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def attention(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same; with ``angles`` places are rotary."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if angles is not None:
            q, k = (rotate(part, angles).type_as(v) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def network(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same, each token by itself."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor | None = None) -> Tensor:
        """(batch, tokens, width) to the same; condition (batch, width)."""
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        x = x + parts[2] * self.attention(shifted(self.norms[0](x), *parts[:2]), angles)
        return x + parts[5] * self.network(shifted(self.norms[1](x), *parts[3:5]))


def waves(times: Tensor, frequencies: int = FREQUENCIES) -> Tensor:
    """(n) times to (n, frequencies) cosines and sines."""
    turns = 1e4 ** -(torch.arange(frequencies // 2, device=times.device) * 2 / frequencies)
    angles = times[:, None].float() * turns
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def shifted(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x times 1 + scale, and shift added."""
    return x * (1 + scale) + shift


class Dit(nn.Module):
    """Predicts noise and its variance in latents of four channels, ``size`` x ``size``."""

    def __init__(
        self, width: int, layers: int, heads: int, size: int, patch: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Buffer(torch.zeros(1, (size // patch) ** 2, width))
        self.times = nn.Sequential(
            nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.classes = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch * patch * 8)
        self.patch = patch

    def forward(
        self, latents: Tensor, times: Tensor, labels: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """(batch, 4, size, size) to (batch, 8, size, size); ``noise`` is the loss's."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.times(waves(times).type_as(latents)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(shifted(self.norm(x), *parts)).transpose(1, 2)
        return F.fold(x, latents.shape[-2:], self.patch, stride=self.patch)


def noise_loss(output: Tensor, inputs: Inputs) -> Tensor:
    """Mean square of the noise that is left, and of the predicted variance."""
    found, variance = output.float().chunk(2, dim=1)
    return F.mse_loss(found, inputs["noise"].float()) + variance.square().mean()
