"""Plain stacks of convolutions: torchvision's VGG, one over volumes with norms and strides.

And ResNets for images of 32 x 32 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from itercast.capture.cases.models.vision import ResNet, convolution


class Vgg(nn.Module):
    """Stages of 3 x 3 convolutions of one width, each stage ended by pooling; three linear layers.

    The last pooling makes 7 x 7 places of what a picture of 224 pixels leaves.
    """

    def __init__(self, widths: Sequence[int], counts: Sequence[int], classes: int) -> None:
        super().__init__()
        inner = zip([3, *widths[:-1]], widths, counts, strict=True)
        self.stages = nn.Sequential(*(layer for sizes in inner for layer in _stage(*sizes)))
        hidden = 4096
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten())
        for wide in (widths[-1] * 49, hidden):
            self.head.extend([nn.Linear(wide, hidden), nn.ReLU(inplace=True), nn.Dropout()])
        self.head.append(nn.Linear(hidden, classes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes); labels are not used."""
        logits: Tensor = self.head(self.stages(images))
        return logits


def _stage(into: int, width: int, count: int) -> Iterator[nn.Module]:
    for i in range(count):
        yield nn.Conv2d(width if i else into, width, 3, padding=1)
        yield nn.ReLU(inplace=True)
    yield nn.MaxPool2d(2)


class Vgg3d(nn.Module):
    """Stages of 3 x 3 x 3 convolutions with norms, all but the first begun by a stride of 2."""

    def __init__(self, widths: Sequence[int], counts: Sequence[int], classes: int) -> None:
        super().__init__()
        inner = zip([3, *widths[:-1]], widths, counts, [1, *[2] * len(widths[1:])], strict=True)
        self.stages = nn.Sequential(*(layer for sizes in inner for layer in _volumes(*sizes)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Conv3d(widths[-1], classes, 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, depth, height, width) to (batch, classes); labels are not used."""
        return torch.flatten(self.head(self.stages(images)), 1)


def _volumes(into: int, width: int, count: int, stride: int) -> Iterator[nn.Module]:
    for i in range(count):
        yield nn.Conv3d(width if i else into, width, 3, stride=1 if i else stride, padding=1)
        yield nn.BatchNorm3d(width)
        yield nn.ReLU(inplace=True)


class CifarResNet(ResNet):
    """A ResNet whose stem keeps the image's size, as https://github.com/kuangliu/pytorch-cifar."""

    def __init__(self, width: int, **sizes: Any) -> None:
        super().__init__(width, **sizes)
        self.stem = convolution(3, width, 3)
        self.add_module("pool", nn.Identity())
