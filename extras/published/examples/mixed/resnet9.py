"""The nine layers of https://github.com/davidcpage/cifar10-fast for images of 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.vision import convolution

WIDTHS = (64, 128, 256, 512)
SCALE = 0.125  # of the logits


class Pair(nn.Module):
    """Two convolutions beside their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*activated(width, width), *activated(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) to the same."""
        return x + self.parts(x)


def activated(c_in: int, c_out: int) -> tuple[nn.Module, nn.Module]:
    """A 3x3 convolution with batch norm, and ReLU."""
    return convolution(c_in, c_out, 3), nn.ReLU(inplace=True)


def resnet9(batch: int) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """The network, images and the sum of their cross-entropies."""
    layers = [*activated(3, WIDTHS[0])]
    for number, (c_in, c_out) in enumerate(pairwise(WIDTHS)):
        layers += [*activated(c_in, c_out), nn.MaxPool2d(2)]
        layers += [Pair(c_out)] if number != 1 else []
    layers += [nn.MaxPool2d(4), nn.Flatten(), nn.Linear(WIDTHS[-1], 10, bias=False)]
    labels = torch.randint(0, 10, (batch,))

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits * SCALE, labels.to(logits.device), reduction="sum")

    return nn.Sequential(*layers), torch.randn(batch, 3, 32, 32), loss
