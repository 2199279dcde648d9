"""ResNets for images of 32 x 32 pixels."""

from __future__ import annotations

from typing import Any

from torch import nn

from itercast.capture.cases.models.vision import ResNet, convolution


class CifarResNet(ResNet):
    """A ResNet whose stem keeps the image's size, as https://github.com/kuangliu/pytorch-cifar."""

    def __init__(self, width: int, **sizes: Any) -> None:
        super().__init__(width, **sizes)
        self.stem = convolution(3, width, 3)
        self.add_module("pool", nn.Identity())
