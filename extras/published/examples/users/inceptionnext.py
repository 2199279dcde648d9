"""InceptionNeXt (arXiv:2303.16900) as https://github.com/sail-sg/inceptionnext has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BAND = 11  # length of the kernels of one row or column


class InceptionNextBlock(nn.Module):
    """An eighth of the channels under each of three depthwise kernels, then a 1x1 MLP."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        part = width // 8
        self.parts = (width - 3 * part, part, part, part)
        self.square = nn.Conv2d(part, part, 3, padding=1, groups=part)
        self.row = nn.Conv2d(part, part, (1, BAND), padding=(0, BAND // 2), groups=part)
        self.column = nn.Conv2d(part, part, (BAND, 1), padding=(BAND // 2, 0), groups=part)
        self.norm = nn.BatchNorm2d(width)
        self.up, self.down = (
            nn.Conv2d(width, ratio * width, 1),
            nn.Conv2d(ratio * width, width, 1),
        )
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) to the same."""
        kept, square, row, column = x.split(self.parts, dim=1)
        y = torch.cat((kept, self.square(square), self.row(row), self.column(column)), dim=1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        return y * self.gamma.reshape(1, -1, 1, 1) + x


class InceptionNext(nn.Module):
    """Four stages of blocks; a convolution quarters the image before the first, halves it later."""

    def __init__(self, width: int, stages: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width)]
        for stage, depth in enumerate(stages):
            if stage:
                layers += [nn.BatchNorm2d(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
                width *= 2
            ratio = 3 if stage == len(stages) - 1 else 4
            layers += [InceptionNextBlock(width, ratio) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.hidden, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(3 * width)
        self.head = nn.Linear(3 * width, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, 3, h, w) to (batch, classes); ``labels`` are the loss's."""
        x = self.layers(images).mean((2, 3))
        return self.head(self.norm(F.gelu(self.hidden(x))))
