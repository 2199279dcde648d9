"""A small network of tile utilisation, in the manner of NeuSight, trained and run by torch.

A kernel runs as waves of tiles, as many at once as there are cores: time = best * roofline /
utilisation, utilisation = alpha - beta / waves, where a network makes alpha and beta, both between
0 and 1, from the features. ``best`` is the time over the roofline of the fastest rows.
Source: NeuSight (ASPLOS 2025), https://github.com/sitar-lab/NeuSight.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.learners.models.mlp import silu
from itercast.learners.models.training_table import Array

WIDTH = 64  # of the hidden layers
STEPS = 400
BATCH = 256
LEARNING_RATE = 5e-3
FASTEST = 0.01  # quantile of time / roofline that counts as full utilisation
LEAST_UTILISATION = 1e-3
INPUT_LIMIT = 4.0  # standardised features are clipped here


def fit_tiles(x: Array, roofline_us: Array, waves: Array, time_us: Array) -> dict[str, Array]:
    """Train by mean absolute error of log time; returns the arrays that ``tiles_us`` needs."""
    torch.manual_seed(0)
    mean, scale = x.mean(0), 1.0 / (x.std(0) + 1e-6)
    ratio = np.log(time_us / roofline_us)
    best = float(np.quantile(ratio, FASTEST))
    network = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], WIDTH),
        torch.nn.SiLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.SiLU(),
        torch.nn.Linear(WIDTH, 2),
    )

    def log_ratio(inputs: torch.Tensor, waves: torch.Tensor) -> torch.Tensor:
        alpha, beta = torch.sigmoid(network(inputs)).unbind(1)
        return best - torch.log(torch.clamp(alpha - beta / waves, min=LEAST_UTILISATION))

    scaled = _standardised(x, mean, scale)
    known, target = (torch.tensor(a, dtype=torch.float32) for a in (scaled, ratio))
    wave = torch.tensor(np.maximum(waves, 1.0), dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    for _ in range(STEPS):
        index = torch.randint(0, len(known), (min(BATCH, len(known)),))
        loss = (log_ratio(known[index], wave[index]) - target[index]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    weights = {name: value.detach().numpy() for name, value in network.named_parameters()}
    return {"mean": mean, "scale": scale, "best": np.array(best), **weights}


def tiles_us(fitted: Mapping[str, Array], x: Array, roofline_us: Array, waves: Array) -> Array:
    """Predict times in us by a network that ``fit_tiles`` trained."""
    h = _standardised(x, fitted["mean"], fitted["scale"])
    for layer in ("0", "2"):
        h = silu(h @ fitted[f"{layer}.weight"].T + fitted[f"{layer}.bias"])
    alpha, beta = (1 / (1 + np.exp(-(h @ fitted["4.weight"].T + fitted["4.bias"])))).T
    utilisation = np.maximum(alpha - beta / np.maximum(waves, 1.0), LEAST_UTILISATION)
    return roofline_us * np.exp(fitted["best"]) / utilisation


def _standardised(x: Array, mean: Array, scale: Array) -> Array:
    return np.clip((x - mean) * scale, -INPUT_LIMIT, INPUT_LIMIT)
