"""The network of a diffusion model: a U-Net conditioned on time, with attention in the middle."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from itercast.capture.step import Inputs


class TimedBlock(nn.Module):
    """Residual block of two convolutions after group norms, with the time embedding added."""

    def __init__(
        self, c_in: int, c_out: int, time: int, groups: int = 8, dropped: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, c_in), nn.GroupNorm(groups, c_out)
        self.first = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.second = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, c_out), nn.Dropout(dropped)
        self.shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """(batch, c_in, h, w) and (batch, time) to (batch, c_out, h, w)."""
        y = self.first(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.second(self.dropout(F.silu(self.norm2(y))))


class PixelAttention(nn.Module):
    """Self-attention between the pixels of an image, with a residual connection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, h, w) to the same."""
        batch, channels, h, w = x.shape
        split = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, h * w)
        q, k, v = split.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(x.shape))


class Denoiser(nn.Module):
    """Predicts the noise in images at given times (arXiv:2006.11239); one downsampling level."""

    rates: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        wide, time = 2 * width, 4 * width
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.down1, self.down2 = TimedBlock(width, width, time), TimedBlock(width, wide, time)
        self.halve = nn.Conv2d(wide, wide, 3, stride=2, padding=1)
        self.middle, self.attention = TimedBlock(wide, wide, time), PixelAttention(wide, heads)
        self.up1, self.up2 = TimedBlock(2 * wide, wide, time), TimedBlock(3 * width, width, time)
        self.norm, self.leave = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)
        self.register_buffer("rates", 1e4 ** (-torch.arange(width // 2) / (width // 2)))

    def forward(
        self, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(batch, 3, h, w) and (batch,) to (batch, 3, h, w); ``noise`` is for the loss."""
        angles = times[:, None] * self.rates
        time = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.down1(self.enter(images), time)
        y = self.down2(x, time)
        z = self.attention(self.middle(self.halve(y), time))
        z = F.interpolate(z, scale_factor=2)
        z = self.up1(torch.cat((z, y), dim=1), time)
        z = self.up2(torch.cat((z, x), dim=1), time)
        return self.leave(F.silu(self.norm(z)))


def noise_loss(predicted: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Mean squared error of the noise."""
    return F.mse_loss(predicted, inputs["noise"])
