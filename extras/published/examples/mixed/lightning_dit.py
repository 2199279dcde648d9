"""LightningDiT-XL/1 (arXiv:2501.01423) as https://github.com/hustvl/LightningDiT trains it.

A diffusion transformer of latents with 32 channels, 16 x 16 of them an image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.extras.published.examples.users.dit import FREQUENCIES, DitBlock, shifted, waves

WIDTH, HEADS, DEPTH, SIDE, CHANNELS = 1152, 16, 28, 16, 32
HIDDEN = WIDTH * 4 * 2 // 3


class Block(DitBlock):
    """A block of a diffusion transformer with RMS norms and a SwiGLU."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def network(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same, each token by itself."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


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
