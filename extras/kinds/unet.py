"""U-Net (arXiv:1505.04597) with padded convolutions and batch norm, as is common today."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from itercast.capture.cases.models.vision import convolution


class Double(nn.Module):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inside, outside, 3), convolution(outside, outside, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inside, h, w) to (batch, outside, h, w)."""
        return torch.relu_(self.second(torch.relu_(self.first(x))))


class UNet(nn.Module):
    """U-Net with ``depth`` levels: each halves the image and doubles the channels.

    ``forward`` takes ``labels`` only because the loss needs them.
    """

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem, self.pool = Double(3, width), nn.MaxPool2d(2)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        steps = list(pairwise(reversed(widths)))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in steps)
        self.up = nn.ModuleList(Double(a, b) for a, b in steps)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes, h, w); h and w are multiples of 2**depth."""
        x = self.stem(images)
        skipped = []
        for block in self.down:
            skipped.append(x)
            x = block(self.pool(x))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((skipped.pop(), grow(x)), dim=1))
        return self.head(x)
