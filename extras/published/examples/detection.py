"""SSD object detector (arXiv:1512.02325) on a ResNet-50."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from itercast.capture.cases.kinds import Sizes
from itercast.capture.cases.models.vision import Residual, convolution
from itercast.capture.step import Inputs

BOXES = (4, 6, 6, 6, 4, 4)  # boxes per pixel of each feature map
INNER, OUTER = (256, 256, 128, 128, 128), (1024, 512, 512, 256, 256, 256)
HALVED = 3  # added maps with stride 2; the others have no padding
RARE = 0.01  # no assumption: share of an image's default boxes that hold an object, drawn at random


class Ssd(nn.Module):
    """SSD: boxes and classes from six feature maps.

    The first map is that of ResNet-50's third stage, which does not downsample here. ``forward``
    takes ``boxes`` and ``labels`` only because the loss needs them.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.stem, self.pool = convolution(3, 64, 7, 2), nn.MaxPool2d(3, stride=2, padding=1)
        stages = ((64, 64, 3, 1), (256, 128, 4, 2), (512, 256, 6, 1))
        blocks: list[nn.Module] = []
        for c_in, width, depth, stride in stages:
            blocks.append(Residual(c_in, width, stride, True))
            blocks += [Residual(4 * width, width, 1, True) for _ in range(depth - 1)]
        self.base = nn.Sequential(*blocks)
        self.more = nn.ModuleList()
        for number, (inner, (c_in, c_out)) in enumerate(zip(INNER, pairwise(OUTER), strict=True)):
            last: tuple[int, int] = (2, 1) if number < HALVED else (1, 0)
            self.more.append(self._map(c_in, inner, c_out, *last))
        sizes = list(zip(OUTER, BOXES, strict=True))
        self.where = nn.ModuleList(nn.Conv2d(c, 4 * n, 3, padding=1) for c, n in sizes)
        self.what = nn.ModuleList(nn.Conv2d(c, classes * n, 3, padding=1) for c, n in sizes)

    @staticmethod
    def _map(c_in: int, inner: int, c_out: int, stride: int, padding: int) -> nn.Sequential:
        return nn.Sequential(
            *(convolution(c_in, inner, 1), nn.ReLU(inplace=True)),
            nn.Conv2d(inner, c_out, 3, stride, padding, bias=False),
            *(nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)),
        )

    def forward(
        self,
        images: torch.Tensor,
        boxes: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, 3, h, w) to boxes (batch, 4, places) and scores (batch, classes, places).

        ``places`` counts the default boxes of an image.
        """
        maps = [self.base(self.pool(torch.relu_(self.stem(images))))]
        for layer in self.more:
            maps.append(layer(maps[-1]))
        pairs = list(zip(maps, self.where, self.what, strict=True))
        found = [where(x).reshape(len(x), 4, -1) for x, where, _ in pairs]
        kinds = [what(x).reshape(len(x), self.classes, -1) for x, _, what in pairs]
        return torch.cat(found, 2), torch.cat(kinds, 2)


def detection_loss(
    found: tuple[torch.Tensor, torch.Tensor], boxes: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Loss of SSD: box distances of objects, and cross-entropy of objects and of hard negatives.

    Three negatives count per object, those with the largest loss. ``boxes`` (batch, 4, places) are
    offsets; ``labels`` (batch, places) are 0 where there is no object.
    """
    where, kinds = found
    objects = labels > 0
    count = objects.sum(1)
    distance = (F.smooth_l1_loss(where, boxes, reduction="none").sum(1) * objects).sum(1)
    wrong = F.cross_entropy(kinds, labels, reduction="none")
    order = wrong.detach().masked_fill(objects, 0).argsort(1, descending=True)
    worst = order.argsort(1) < (3 * count).clamp(max=labels.shape[1])[:, None]
    total = distance + (wrong * (objects.float() + worst.float())).sum(1)
    return (total * (count > 0) / count.clamp(min=1)).mean()


def boxes(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Images with the ``places`` of default boxes, of which 1 % hold an object."""
    places, image = (batch, sizes["places"]), sizes["image"]
    labels = torch.randint(1, sizes["classes"], places) * (torch.rand(places) < RARE)
    images = torch.randn(batch, 3, image, image)
    return {"images": images, "boxes": torch.randn(batch, 4, sizes["places"]), "labels": labels}


def ssd_loss(output: tuple[torch.Tensor, torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """Loss of boxes and classes."""
    return detection_loss(output, inputs["boxes"], inputs["labels"])
