"""Swin, MLP-Mixer and Conformer, in small sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def network(width: int, hidden: int) -> nn.Sequential:
    """A feed-forward network: two linear layers with GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class WindowAttention(nn.Module):
    """Swin block: attention inside shifted windows with a relative position bias, then an MLP."""

    distance: torch.Tensor

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = network(width, 4 * width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(*2 * [torch.arange(window)], indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]) + window - 1
        self.register_buffer("distance", (apart[0] * (2 * window - 1) + apart[1]).flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, h, w, width) to the same."""
        batch, h, w, width = x.shape
        n, back = self.window, (-self.shift, -self.shift)
        y = self.norm1(x)
        y = torch.roll(y, back, (1, 2)) if self.shift else y
        y = y.view(batch, h // n, n, w // n, n, width).transpose(2, 3).reshape(-1, n * n, width)
        y = self.out(self._attend(y))
        y = y.view(batch, h // n, w // n, n, n, width).transpose(2, 3).reshape(x.shape)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.network(self.norm2(x))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        size = self.window**2
        q, k, v = self.qkv(x).view(len(x), size, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.distance].view(size, size, self.heads).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(x.shape)


class Swin(nn.Module):
    """Swin transformer without downsampling; every second layer is shifted (arXiv:2103.14030)."""

    def __init__(self, width: int, layers: int, heads: int, window: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        shifts = [window // 2 * (i % 2) for i in range(layers)]
        self.layers = nn.ModuleList(WindowAttention(width, heads, window, s) for s in shifts)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        x = self.patches(images).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))


class MixerLayer(nn.Module):
    """Mixer layer: an MLP over patches, then an MLP over channels (arXiv:2105.01601)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.channels = network(places, 4 * places), network(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, patches, width) to the same shape."""
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer: a classifier of patches without attention (arXiv:2105.01601)."""

    def __init__(self, width: int, layers: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        places = (size // patch) ** 2
        self.layers = nn.Sequential(*(MixerLayer(places, width) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, size, size) to (batch, classes)."""
        x = self.layers(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(x.mean(1))


class ConformerLayer(nn.Module):
    """Conformer layer: feed-forward, attention, depthwise convolution (arXiv:2005.08100)."""

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm, self.out = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + 0.5 * self.down(F.dropout(F.silu(self.up(self.norm1(x))), 0.1, self.training))
        y = self.norm2(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.gate(self.norm3(x).transpose(1, 2)), dim=1)
        y = self.out(F.silu(self.norm(self.depthwise(y))))
        return x + y.transpose(1, 2)


class Conformer(nn.Module):
    """Conformer that classifies every frame of a signal."""

    def __init__(self, width: int, layers: int, heads: int, kernel: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ConformerLayer(width, heads, kernel) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, signal: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, length, width) to (batch, classes, length)."""
        return self.head(self.layers(signal)).transpose(1, 2)
