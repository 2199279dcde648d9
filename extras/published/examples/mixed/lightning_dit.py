"""LightningDiT-XL/1 (arXiv:2501.01423) as https://github.com/hustvl/LightningDiT trains it.

A diffusion transformer of latents with 32 channels, 16 x 16 of them an image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.transformers import rotate
from itercast.extras.published.examples.users.dit import FREQUENCIES, shifted, waves

WIDTH, HEADS, DEPTH, SIDE, CHANNELS = 1152, 16, 28, 16, 32
HIDDEN = WIDTH * 4 * 2 // 3


class Block(nn.Module):
    """Attention with rotary places and a SwiGLU, each shifted, scaled and gated."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        """(batch, tokens, width) to the same; condition (batch, width)."""
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        y = self.qkv(shifted(self.norms[0](x), *parts[:2])).unflatten(-1, (3, HEADS, -1))
        q, k, v = y.permute(2, 0, 3, 1, 4)
        q, k = (rotate(part, angles).type_as(v) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.out(y)
        gate, up = self.up(shifted(self.norms[1](x), *parts[3:5])).chunk(2, dim=-1)
        return x + parts[5] * self.down(F.silu(gate) * up)


class LightningDit(nn.Module):
    """Predicts the velocity of latents between noise and image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(CHANNELS, WIDTH, 1)
        self.places = nn.Buffer(torch.zeros(1, SIDE**2, WIDTH))
        self.angles = nn.Buffer(torch.rand(SIDE**2, WIDTH // HEADS))
        self.times = nn.Sequential(
            nn.Linear(FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.classes = nn.Embedding(1001, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.modulation = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.leave = nn.Linear(WIDTH, CHANNELS)

    def forward(self, noise: Tensor, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """The loss of latents (batch, channels, side, side): square error, and 1 - cosine."""
        share = times[:, None, None, None]
        mixed, target = share * latents + (1 - share) * noise, latents - noise
        x = self.enter(mixed).flatten(2).transpose(1, 2) + self.places
        condition = self.times(waves(times).type_as(latents)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition, self.angles)
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        found = self.leave(shifted(self.norm(x), *parts)).transpose(1, 2).unflatten(2, (SIDE, -1))
        turned = 1 - F.cosine_similarity(found.float(), target.float(), dim=1).mean()
        return F.mse_loss(found.float(), target.float()) + turned


def lightning_dit(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Noise, latents, times and classes."""
    latents = torch.randn(2, batch, CHANNELS, SIDE, SIDE).unbind()
    return LightningDit(), (*latents, torch.rand(batch), torch.randint(0, 1000, (batch,)))
