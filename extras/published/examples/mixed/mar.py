"""MAR-L (arXiv:2406.11838) as https://github.com/LTH14/mar trains it on latents made before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.extras.published.examples.users.dit import waves

PLACES, CHANNELS, BUFFER = 256, 16, 64  # latents of an image, their channels, class tokens before
MASKED = 222  # 0.867 of the places: mean of a Gaussian about 1 of width 0.25 between 0.7 and 1
DRAWS = 4  # diffusion steps drawn for each place
WIDTH, HEADS, DEPTH, STEPS = 1024, 16, 16, 3


class Block(nn.Module):
    """Attention and an MLP behind norms, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        y = self.dropout(F.gelu(self.up(self.norms[1](x))))
        return x + self.dropout(self.down(y))


class Denoiser(nn.Module):
    """An MLP of three blocks, shifted, scaled and gated by its condition, on single latents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.condition, self.enter = nn.Linear(width, width), nn.Linear(CHANNELS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(STEPS))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(STEPS)
        )
        sizes = (*[3 * width] * STEPS, 2 * width)
        self.modulations = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.leave = nn.Linear(width, 2 * CHANNELS)

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """(latents, channels) to (latents, 2 channels)."""
        y = self.times(waves(times).type_as(x)) + self.condition(condition)
        x = self.enter(x)
        for norm, part, modulation in zip(self.norms, self.parts, self.modulations, strict=False):
            shift, scale, gate = modulation(F.silu(y)).chunk(3, dim=-1)
            x = x + gate * part(norm(x) * (1 + scale) + shift)
        shift, scale = self.modulations[-1](F.silu(y)).chunk(2, dim=-1)
        return self.leave(self.norm(x) * (1 + scale) + shift)


class Mar(nn.Module):
    """An encoder of the places seen, a decoder of all, and a small diffusion model of each."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(1000, WIDTH)
        self.enter, self.norm = nn.Linear(CHANNELS, WIDTH), nn.LayerNorm(WIDTH)
        self.places = nn.ParameterList(torch.zeros(1, BUFFER + PLACES, WIDTH) for _ in range(2))
        self.encoder = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(DEPTH)))
        self.decoder = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(DEPTH)))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.offsets = nn.Parameter(torch.zeros(1, PLACES, WIDTH))
        self.denoiser = Denoiser(WIDTH)

    def decoded(self, latents: Tensor, labels: Tensor, order: Tensor) -> Tensor:
        """(batch, places, channels) to (batch, places, width); ``order`` is of the places."""
        before = self.classes(labels).unsqueeze(1).expand(-1, BUFFER, -1)
        x = self.norm(torch.cat((before, self.enter(latents)), dim=1) + self.places[0])
        seen = order[:, : BUFFER + PLACES - MASKED, None].expand(-1, -1, WIDTH)
        x = self.between(self.norms[0](self.encoder(x.gather(1, seen))))
        whole = self.hidden.to(x.dtype).expand(len(x), BUFFER + PLACES, -1).scatter(1, seen, x)
        x = self.norms[1](self.decoder(whole + self.places[1]))
        return x[:, BUFFER:] + self.offsets

    def forward(self, latents: Tensor, labels: Tensor, order: Tensor, times: Tensor) -> Tensor:
        """The mean loss of the places that are masked."""
        found = self.decoded(latents, labels, order).flatten(0, 1).repeat(DRAWS, 1)
        target = latents.flatten(0, 1).repeat(DRAWS, 1)
        noise = torch.randn_like(target)
        mixed = target * 0.5 + noise * 0.5
        out, spread = self.denoiser(mixed, times, found).float().chunk(2, dim=-1)
        return ((out - noise).pow(2) + spread.pow(2)).mean(-1).mean()


def mar(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Random latents, classes, an order of the places, and times of the diffusion."""
    order = torch.arange(BUFFER + PLACES).expand(batch, -1).contiguous()
    times = torch.randint(0, 1000, (batch * PLACES * DRAWS,))
    latents = torch.randn(batch, PLACES, CHANNELS)
    return Mar(), (latents, torch.randint(0, 1000, (batch,)), order, times)
