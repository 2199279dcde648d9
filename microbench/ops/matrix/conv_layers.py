"""Draws convolution layers as ResNets, U-Nets, ViTs, MobileNets, audio and small CNNs have them.

A layer is a mapping of fields of ``itercast.microbench.ops.matrix.conv.Conv``, without batch and
direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from itercast.microbench.ops.family import log_uniform

Layer = dict[str, Any]  # fields of a convolution by name


def _channels(rng: np.random.Generator, low: int, high: int) -> int:
    """Draws a number of channels, mostly a multiple of 8."""
    n = log_uniform(rng, low, high)
    return max(8, 8 * round(n / 8)) if rng.random() < 0.7 else n


def _square(size: int, kernel: int, padding: int) -> dict[str, int]:
    sides = {"h": size, "w": size, "kernel_h": kernel, "kernel_w": kernel}
    return sides | {"padding_h": padding, "padding_w": padding}


def _resnet(rng: np.random.Generator) -> Layer:
    if rng.random() < 0.15:
        size = int(rng.choice([32, 64, 112, 128, 224]))
        out = _channels(rng, 16, 96)
        return {**_square(size, 7, 3), "in_channels": 3, "out_channels": out, "stride": 2}
    kernel = int(rng.choice([1, 3]))
    dilation = 2 if kernel == 3 and rng.random() < 0.1 else 1
    return {
        **_square(log_uniform(rng, 4, 64), kernel, dilation * (kernel // 2)),
        "in_channels": _channels(rng, 16, 1024),
        "out_channels": _channels(rng, 16, 1024),
        "stride": int(rng.choice([1, 1, 2])),
        "dilation": dilation,
    }


def _unet(rng: np.random.Generator) -> Layer:
    channels = _channels(rng, 16, 512)
    if rng.random() < 0.4:
        up = _square(log_uniform(rng, 4, 64), 2, 0)
        up |= {"in_channels": channels, "out_channels": max(1, channels // 2), "stride": 2}
        return {**up, "transposed": True, "bias": True}
    out = int(rng.choice([channels, max(1, channels // 2), 2 * channels]))
    same = _square(log_uniform(rng, 8, 128), 3, 1)
    return {**same, "in_channels": channels, "out_channels": out, "bias": True}


def _patch(rng: np.random.Generator) -> Layer:
    patch = int(rng.choice([4, 8, 14, 16, 32]))
    sides = _square(patch * log_uniform(rng, 4, 24), patch, 0)
    width = _channels(rng, 32, 1024)
    return {**sides, "in_channels": 3, "out_channels": width, "stride": patch, "bias": True}


def _depthwise(rng: np.random.Generator) -> Layer:
    kernel, channels = int(rng.choice([3, 3, 5, 7])), _channels(rng, 16, 768)
    return {
        **_square(log_uniform(rng, 4, 64), kernel, kernel // 2),
        "in_channels": channels,
        "out_channels": channels,
        "stride": int(rng.choice([1, 1, 2])),
        "groups": channels,
    }


def _audio(rng: np.random.Generator) -> Layer:
    kernel = int(rng.choice([1, 3, 3, 5, 10]))
    row = {"h": 1, "w": log_uniform(rng, 32, 4096), "kernel_h": 1, "kernel_w": kernel}
    row |= {"padding_w": kernel // 2, "in_channels": _channels(rng, 8, 768)}
    row |= {"out_channels": _channels(rng, 8, 768), "stride": int(rng.choice([1, 1, 2]))}
    return {**row, "bias": True}


def _small(rng: np.random.Generator) -> Layer:
    sides = _square(log_uniform(rng, 8, 128), int(rng.choice([3, 3, 5])), int(rng.integers(2)))
    into = int(rng.choice([1, 3, log_uniform(rng, 4, 64)]))
    return {**sides, "in_channels": into, "out_channels": log_uniform(rng, 4, 128), "bias": True}


# ResNets twice, so that they are drawn twice as often.
KINDS: Sequence[Callable[[np.random.Generator], Layer]] = (
    _resnet,
    _resnet,
    _unet,
    _patch,
    _depthwise,
    _audio,
    _small,
)
