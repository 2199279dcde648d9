"""EfficientNet, ConvNeXt, DenseNet, WaveNet and U-Net, in small sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from itercast.capture.cases.models.vision import convolution


class Excitation(nn.Module):
    """Squeeze-and-excitation: scales channels by a gate made of their means (arXiv:1709.01507)."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, h, w) to the same."""
        gate = self.second(F.silu(self.first(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


class Inverted(nn.Module):
    """Inverted residual block: 1x1 to four times the channels, depthwise 3x3, gate, 1x1 back."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * c_in
        depthwise = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        self.layers = nn.Sequential(
            *(convolution(c_in, wide, 1), nn.SiLU()),
            *(depthwise, nn.BatchNorm2d(wide), nn.SiLU()),
            *(Excitation(wide, c_in // 4), convolution(wide, c_out, 1)),
        )
        self.residual = c_in == c_out and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, c_in, h, w) to (batch, c_out, h / stride, w / stride)."""
        y: torch.Tensor = self.layers(x)
        return x + y if self.residual else y


class EfficientNet(nn.Module):
    """EfficientNet: stages of inverted residuals that halve the image (arXiv:1905.11946)."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(3, widths[0], 3, 2), nn.SiLU()]
        for c_in, c_out in pairwise(widths):
            layers.append(Inverted(c_in, c_out, 2))
            layers += [Inverted(c_out, c_out, 1) for _ in range(depth - 1)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        return self.head(self.layers(images).mean((2, 3)))


class NextBlock(nn.Module):
    """ConvNeXt block: a 7x7 depthwise convolution, then layer norm and an MLP in NHWC."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, h, w) to the same."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt: 4x4 patches, then stages of blocks that halve the image (arXiv:2201.03545)."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4)]
        for number, width in enumerate(widths):
            if number:
                layers.append(nn.Conv2d(widths[number - 1], width, 2, stride=2))
            layers += [NextBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        return self.head(self.norm(self.layers(images).mean((2, 3))))


class DenseBlock(nn.Module):
    """Dense block: each layer reads the concatenated outputs of all before (arXiv:1608.06993)."""

    def __init__(self, c_in: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(c_in + i * growth), nn.ReLU()),
                *(convolution(c_in + i * growth, 4 * growth, 1), nn.ReLU()),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, c_in, h, w) to (batch, c_in + depth * growth, h, w)."""
        for layer in self.layers:
            x = torch.cat((x, layer(x)), dim=1)
        return x


class DenseNet(nn.Module):
    """DenseNet: two dense blocks with a pooling layer between them."""

    def __init__(self, width: int, growth: int, depth: int, classes: int) -> None:
        super().__init__()
        grown = width + depth * growth
        self.layers = nn.Sequential(
            *(convolution(3, width, 3, 2), nn.ReLU(), DenseBlock(width, growth, depth)),
            *(nn.Conv2d(grown, width, 1), nn.AvgPool2d(2), DenseBlock(width, growth, depth)),
        )
        self.head = nn.Linear(grown, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        return self.head(torch.relu(self.layers(images)).mean((2, 3)))


class Dilated(nn.Module):
    """WaveNet layer: a gated causal convolution with this dilation, added to its input."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=dilation, padding=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, length) to the same."""
        value, gate = self.both(x)[..., : x.shape[-1]].chunk(2, dim=1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class WaveNet(nn.Module):
    """WaveNet: layers with dilations 1, 2, 4, ... classify every sample (arXiv:1609.03499)."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.layers = nn.Sequential(*(Dilated(width, 2**i) for i in range(layers)))
        self.head = nn.Conv1d(width, classes, 1)

    def forward(self, signal: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, length, 1) to (batch, classes, length)."""
        x = self.layers(self.enter(signal.transpose(1, 2)))
        return self.head(torch.relu(x))


class Double(nn.Module):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.first, self.second = convolution(c_in, c_out, 3), convolution(c_out, c_out, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, c_in, h, w) to (batch, c_out, h, w)."""
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
