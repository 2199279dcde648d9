"""ViT and ResNet; their ``forward`` takes ``labels`` only because the loss needs them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from itercast.capture.cases.models.transformers import Block


class Vit(nn.Module):
    """Vision transformer with a class token and a linear head (arXiv:2010.11929)."""

    def __init__(
        self, width: int, layers: int, heads: int, size: int, patch: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block("vit", width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)

    def enter(self, images: torch.Tensor) -> torch.Tensor:
        """Embed patches: (batch, 3, size, size) to the blocks' input."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions

    def through(self, x: torch.Tensor, blocks: Iterable[nn.Module]) -> torch.Tensor:
        """Run some of the blocks."""
        for block in blocks:
            x = block(x)
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm and head: the blocks' output to (batch, classes)."""
        return self.head(self.norm(x)[:, 0])

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, size, size) to (batch, classes)."""
        return self.leave(self.through(self.enter(images), self.blocks))


def convolution(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, followed by batch norm."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out))


class Residual(nn.Module):
    """Residual block, relu(x + f(x)): f is two 3x3 convolutions, or a 1x1, 3x3, 1x1 bottleneck."""

    def __init__(self, c_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        c_out = 4 * width if bottleneck else width
        if bottleneck:
            first = [convolution(c_in, width, 1), convolution(width, width, 3, stride)]
            last = convolution(width, c_out, 1)
        else:
            first = [convolution(c_in, width, 3, stride)]
            last = convolution(width, c_out, 3)
        self.first, self.last = nn.ModuleList(first), last
        changes = stride != 1 or c_in != c_out
        self.shortcut = convolution(c_in, c_out, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, c_in, h, w) to (batch, c_out, h / stride, w / stride)."""
        y = x
        for layer in self.first:
            y = torch.relu_(layer(y))
        return torch.relu_(self.last(y) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet (arXiv:1512.03385): each stage halves the image and doubles the width."""

    def __init__(
        self, width: int, stages: tuple[int, ...], bottleneck: bool, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks, c_in = [], width
        for number, depth in enumerate(stages):
            inner = width * 2**number
            for index in range(depth):
                stride = 2 if index == 0 and number > 0 else 1
                blocks.append(Residual(c_in, inner, stride, bottleneck))
                c_in = 4 * inner if bottleneck else inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c_in, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        x = self.blocks(self.pool(torch.relu_(self.stem(images))))
        return self.head(x.mean((2, 3)))
