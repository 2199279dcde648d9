"""PSPNet and DeepLabV3+ on a dilated ResNet, as in https://github.com/open-mmlab/mmsegmentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itercast.capture.cases.models.vision import Residual, convolution
from itercast.capture.step import Inputs

WIDTH = 512  # channels of a head
POOLS = (1, 2, 3, 6)  # rows and columns of PSPNet's pooled maps
DILATIONS = (12, 24, 36)  # of DeepLab's kernels, beside a 1x1
STAGES = ((1, 1), (2, 1), (1, 2), (1, 4))  # stride and dilation
AUXILIARY = 0.4  # weight of the second head's loss


def dilated(c_in: int, c_out: int, stride: int, dilation: int, groups: int = 1) -> nn.Module:
    """A 3x3 convolution without bias, followed by batch norm."""
    places = {"padding": dilation, "dilation": dilation, "groups": groups}
    conv = nn.Conv2d(c_in, c_out, 3, stride, bias=False, **places)  # type: ignore[arg-type]
    return nn.Sequential(conv, nn.BatchNorm2d(c_out))


def separable(c_in: int, c_out: int, dilation: int = 1) -> nn.Module:
    """A depthwise 3x3 convolution and a 1x1 one, each with batch norm and ReLU."""
    depthwise = dilated(c_in, c_in, 1, dilation, c_in)
    return nn.Sequential(depthwise, nn.ReLU(True), convolution(c_in, c_out, 1), nn.ReLU(True))


class Bottleneck(Residual):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions, the 3x3 one dilated."""

    def __init__(self, c_in: int, width: int, stride: int, dilation: int) -> None:
        super().__init__(c_in, width, stride, bottleneck=True)
        self.first[1] = dilated(width, width, stride, dilation)


class Pyramid(nn.Module):
    """PSPNet's head: maps pooled to few pixels beside the map itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(n), convolution(2048, WIDTH, 1), nn.ReLU(True))
            for n in POOLS
        )
        self.joined = nn.Sequential(convolution(4 * WIDTH + 2048, WIDTH, 3), nn.ReLU(True))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """The maps of the four stages to (batch, width, h / 8, w / 8)."""
        size = maps[-1].shape[-2:]
        found = [resized(pool(maps[-1]), size) for pool in self.pooled]
        return self.joined(torch.cat((maps[-1], *found), dim=1))


class Atrous(nn.Module):
    """DeepLabV3+'s head: separable kernels of several dilations, and the first stage's details."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), convolution(2048, WIDTH, 1), nn.ReLU(True)
        )
        self.point = nn.Sequential(convolution(2048, WIDTH, 1), nn.ReLU(True))
        self.kernels = nn.ModuleList(separable(2048, WIDTH, d) for d in DILATIONS)
        self.joined = nn.Sequential(convolution(5 * WIDTH, WIDTH, 3), nn.ReLU(True))
        self.details = nn.Sequential(convolution(256, 48, 1), nn.ReLU(True))
        self.last = nn.Sequential(separable(WIDTH + 48, WIDTH), separable(WIDTH, WIDTH))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """The maps of the four stages to (batch, width, h / 4, w / 4)."""
        x = maps[-1]
        found = [resized(self.image(x), x.shape[-2:]), self.point(x)]
        joined = self.joined(torch.cat((*found, *(kernel(x) for kernel in self.kernels)), dim=1))
        joined = resized(joined, maps[0].shape[-2:])
        return self.last(torch.cat((joined, self.details(maps[0])), dim=1))


def resized(x: Tensor, size: torch.Size) -> Tensor:
    """Bilinear interpolation of a map to another size."""
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class Segmentation(nn.Module):
    """Classes of pixels by a head on the last stage, and by a small one on the third."""

    def __init__(self, head: str, stages: tuple[int, ...], classes: int) -> None:
        super().__init__()
        parts = ((3, 32, 2), (32, 32, 1), (32, 64, 1))
        self.stem = nn.Sequential(
            *(nn.Sequential(convolution(a, b, 3, s), nn.ReLU(True)) for a, b, s in parts),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages, c_in = nn.ModuleList(), 64
        for number, (depth, (stride, dilation)) in enumerate(zip(stages, STAGES, strict=True)):
            width = 64 * 2**number
            shapes = [(c_in, stride)] + [(4 * width, 1)] * (depth - 1)
            blocks = [Bottleneck(a, width, s, dilation) for a, s in shapes]
            self.stages.append(nn.Sequential(*blocks))
            c_in = 4 * width
        self.head = Pyramid() if head == "psp" else Atrous()
        self.dropout = nn.Dropout2d(0.1)
        self.pixels = nn.Conv2d(WIDTH, classes, 1)
        self.second = nn.Sequential(
            *(convolution(1024, 256, 3), nn.ReLU(True)),
            *(nn.Dropout2d(0.1), nn.Conv2d(256, classes, 1)),
        )

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(batch, 3, h, w) to twice (batch, classes, h, w); ``labels`` are the loss's."""
        x, maps = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        found = (self.pixels(self.dropout(self.head(maps))), self.second(maps[2]))
        first, second = (resized(y, images.shape[-2:]) for y in found)
        return first, second


def pixel_loss(output: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    """Cross-entropy of both heads' pixels."""
    first, second = (F.cross_entropy(logits, inputs["labels"]) for logits in output)
    return first + AUXILIARY * second
