"""YOLOv5l as https://github.com/ultralytics/yolov5 had it in the summer of 2021 (its release 5)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, ANCHORS = 80, 3
SIZE, CELLS = 640, (80, 40, 20)  # pixels of an image, rows and columns of its three maps
MATCHED = 100  # anchors of an image and a map that hold an object: some 10 objects, 3 cells of each
WEIGHTS = (4.0, 1.0, 0.4)  # of the objectness of the three maps


def conv(c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, batch norm and SiLU."""
    layer = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(c_out), nn.SiLU(inplace=True))


class Step(nn.Module):
    """A 1x1 and a 3x3 convolution, beside their input or not."""

    def __init__(self, width: int, beside: bool) -> None:
        super().__init__()
        self.parts, self.beside = nn.Sequential(conv(width, width), conv(width, width, 3)), beside

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) to the same."""
        return x + self.parts(x) if self.beside else self.parts(x)


class Split(nn.Module):
    """Half of the channels through steps, half past them."""

    def __init__(self, c_in: int, c_out: int, depth: int, beside: bool = True) -> None:
        super().__init__()
        half = c_out // 2
        self.first, self.second = conv(c_in, half), conv(c_in, half)
        self.steps = nn.Sequential(*(Step(half, beside) for _ in range(depth)))
        self.joined = conv(2 * half, c_out)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, c_in, h, w) to (batch, c_out, h, w)."""
        return self.joined(torch.cat((self.steps(self.first(x)), self.second(x)), dim=1))


class Pools(nn.Module):
    """The map beside its maxima over 5, 9 and 13 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.joined = conv(width, width // 2), conv(2 * width, width)
        self.pools = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in (5, 9, 13))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) to the same."""
        x = self.first(x)
        return self.joined(torch.cat((x, *(pool(x) for pool in self.pools)), dim=1))


class Yolo(nn.Module):
    """Boxes, objectness and classes of anchors on maps of strides 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(12, 64, 3)
        shapes = ((64, 128, 3), (128, 256, 9), (256, 512, 9))
        self.stages = nn.ModuleList(
            nn.Sequential(conv(a, b, 3, 2), Split(b, b, depth)) for a, b, depth in shapes
        )
        self.last = nn.Sequential(conv(512, 1024, 3, 2), Pools(1024), Split(1024, 1024, 3, False))
        self.narrow = nn.ModuleList((conv(1024, 512), conv(512, 256)))
        self.upper = nn.ModuleList((Split(1024, 512, 3, False), Split(512, 256, 3, False)))
        self.halved = nn.ModuleList((conv(256, 256, 3, 2), conv(512, 512, 3, 2)))
        self.lower = nn.ModuleList((Split(512, 512, 3, False), Split(1024, 1024, 3, False)))
        c_out = ANCHORS * (CLASSES + 5)
        self.heads = nn.ModuleList(nn.Conv2d(width, c_out, 1) for width in (256, 512, 1024))

    def forward(self, images: Tensor) -> list[Tensor]:
        """(batch, 3, 640, 640) to three of (batch, anchors, h, w, classes + 5)."""
        corners = [images[..., i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x, maps = self.stem(torch.cat(corners, dim=1)), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        x, kept = self.last(x), []
        for narrow, upper, side in zip(self.narrow, self.upper, maps[:0:-1], strict=True):
            kept.append(narrow(x))
            x = upper(torch.cat((F.interpolate(kept[-1], scale_factor=2.0), side), dim=1))
        found = [x]
        for halved, lower in zip(self.halved, self.lower, strict=True):
            found.append(lower(torch.cat((halved(found[-1]), kept.pop()), dim=1)))
        split = [
            head(x).unflatten(1, (ANCHORS, -1)) for head, x in zip(self.heads, found, strict=True)
        ]
        return [x.permute(0, 1, 3, 4, 2).contiguous() for x in split]


def yolo(batch: int) -> tuple[nn.Module, Tensor, Callable[[list[Tensor]], Tensor]]:
    """The network, images, and a loss of matched anchors that are drawn at random."""
    matched = MATCHED * batch
    places = [torch.randint(0, batch * ANCHORS * n * n, (matched,)) for n in CELLS]
    boxes, classes = torch.rand(matched, 4), torch.randint(0, 2, (matched, CLASSES)).float()

    def loss(maps: list[Tensor]) -> Tensor:
        terms = []
        for found, where, weight in zip(maps, places, WEIGHTS, strict=True):
            picked = found.flatten(0, 3)[where.to(found.device)]
            box = picked[:, :4].sigmoid() * 2
            terms.append((box - boxes.to(box.device)).abs().mean())
            terms.append(
                F.binary_cross_entropy_with_logits(picked[:, 5:], classes.to(picked.device))
            )
            held = torch.zeros_like(found[..., 4])
            terms.append(weight * F.binary_cross_entropy_with_logits(found[..., 4], held))
        return torch.stack(terms).sum() * batch

    return Yolo(), torch.randn(batch, 3, SIZE, SIZE), loss
