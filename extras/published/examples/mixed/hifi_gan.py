"""HiFi-GAN V1 (arXiv:2010.05646), a vocoder, as https://github.com/jik876/hifi-gan trains it.

A generator makes waves from mel spectrograms; eight discriminators judge them beside real ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm

SLOPE = 0.1  # of leaky ReLU
MELS, HOP, WINDOW, SEGMENT = 80, 256, 1024, 8192
RATES, KERNELS, WIDTH = (8, 8, 2, 2), (16, 16, 4, 4), 512
BLOCKS, DILATIONS = (3, 7, 11), (1, 3, 5)
PERIODS = (2, 3, 5, 7, 11)
SCALES = (  # of a discriminator of waves: outputs, kernel, stride, groups
    *((128, 15, 1, 1), (128, 41, 2, 4), (256, 41, 2, 16), (512, 41, 4, 16)),
    *((1024, 41, 4, 16), (1024, 41, 1, 16), (1024, 5, 1, 1)),
)
MEL_WEIGHT = 45


def conv1d(c_in: int, c_out: int, kernel: int, dilation: int = 1) -> nn.Module:
    """A convolution with weight norm that keeps the length."""
    padding = (kernel - 1) * dilation // 2
    layer = nn.Conv1d(c_in, c_out, kernel, padding=padding, dilation=dilation)
    return weight_norm(layer)


class Dilated(nn.Module):
    """Three pairs of convolutions, the first of each dilated, beside their input."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(conv1d(width, width, kernel, d) for d in DILATIONS)
        self.second = nn.ModuleList(conv1d(width, width, kernel) for _ in DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, length) to the same."""
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, SLOPE)), SLOPE))
        return x


class Generator(nn.Module):
    """Transposed convolutions, each followed by the mean of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = conv1d(MELS, WIDTH, 7)
        widths = [WIDTH // 2**i for i in range(len(RATES) + 1)]
        shapes = list(zip(widths, widths[1:], KERNELS, RATES, strict=False))
        self.up = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(a, b, k, r, padding=(k - r) // 2))
            for a, b, k, r in shapes
        )
        self.blocks = nn.ModuleList(
            Dilated(b, kernel) for _, b, _, _ in shapes for kernel in BLOCKS
        )
        self.leave = conv1d(widths[-1], 1, 7)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, mels, frames) to (batch, 1, frames x hop)."""
        x = self.enter(x)
        for number, up in enumerate(self.up):
            x = up(F.leaky_relu(x, SLOPE))
            first, *others = self.blocks[number * len(BLOCKS) : (number + 1) * len(BLOCKS)]
            y = first(x)
            for block in others:
                y = y + block(x)
            x = y / len(BLOCKS)
        return torch.tanh(self.leave(F.leaky_relu(x)))


class Judge(nn.Module):
    """A discriminator of waves, folded to rows of ``period`` unless 0; returns all its maps."""

    def __init__(self, period: int = 0) -> None:
        super().__init__()
        self.period, c_in = period, 1
        layers: list[nn.Module] = []
        if period:
            for c_out, stride in ((32, 3), (128, 3), (512, 3), (1024, 3), (1024, 1)):
                layers.append(nn.Conv2d(c_in, c_out, (5, 1), (stride, 1), (2, 0)))
                c_in = c_out
            layers.append(nn.Conv2d(c_in, 1, (3, 1), padding=(1, 0)))
        else:
            for c_out, kernel, stride, groups in SCALES:
                padding = kernel // 2
                layers.append(nn.Conv1d(c_in, c_out, kernel, stride, padding, 1, groups))
                c_in = c_out
            layers.append(nn.Conv1d(c_in, 1, 3, padding=1))
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        """(batch, 1, length) to the maps of all layers, the last one the judgement."""
        if self.period:
            x = F.pad(x, (0, -x.shape[-1] % self.period), mode="reflect")
            x = x.unflatten(-1, (-1, self.period))
        maps = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = F.leaky_relu(x, SLOPE) if number < len(self.layers) - 1 else x
            maps.append(x)
        return maps


class HifiGan(nn.Module):
    """Both losses of a step in one: the judges' on detached waves, and the generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.judges = nn.ModuleList([*(Judge(p) for p in PERIODS), *(Judge() for _ in range(3))])
        self.pool = nn.AvgPool1d(4, 2, padding=2)
        self.window = nn.Buffer(torch.hann_window(WINDOW))
        self.mel = nn.Buffer(torch.rand(MELS, WINDOW // 2 + 1))

    def judged(self, wave: Tensor) -> Iterable[list[Tensor]]:
        """Maps of all judges; each of the last two hears the wave at half the rate before."""
        for number, judge in enumerate(self.judges):
            wave = self.pool(wave) if number > len(PERIODS) else wave
            yield judge(wave)

    def spectrum(self, wave: Tensor) -> Tensor:
        """(batch, 1, length) to (batch, mels, frames)."""
        edge = (WINDOW - HOP) // 2
        padded = F.pad(wave, (edge, edge), mode="reflect").squeeze(1)
        rows = padded.unfold(-1, WINDOW, HOP) * self.window
        found = torch.fft.rfft(rows)
        power = torch.sqrt(found.real**2 + found.imag**2 + 1e-9)
        return torch.log(torch.clamp(power @ self.mel.T, min=1e-5)).transpose(1, 2)

    def forward(self, mel: Tensor, wave: Tensor) -> Tensor:
        """(batch, mels, frames) and (batch, 1, frames x hop) to the loss."""
        made = self.generator(mel)
        spectrum = self.spectrum(made)
        terms = []
        for real, false in zip(self.judged(wave), self.judged(made.detach()), strict=True):
            terms += [(1 - real[-1]).pow(2).mean(), false[-1].pow(2).mean()]
        terms.append(MEL_WEIGHT * F.l1_loss(spectrum, mel))
        for real, false in zip(self.judged(wave), self.judged(made), strict=True):
            terms.append((1 - false[-1]).pow(2).mean())
            terms += [2 * (a - b).abs().mean() for a, b in zip(real, false, strict=True)]
        return torch.stack(terms).sum()


def hifi_gan(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Segments of 8,192 samples and their 32 frames."""
    return HifiGan(), (torch.randn(batch, MELS, SEGMENT // HOP), torch.randn(batch, 1, SEGMENT))
