"""Small neural networks that predict log(time / roofline); trained by torch, run by numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.learners.models.interpolate import Array
from itercast.learners.models.one_cycle import Adam

WIDTH = 128  # of the hidden layers
INPUT_LIMIT = 4.0  # standardised inputs are clipped here, so that extrapolation stays bounded
CHUNK = 4096  # rows of one numpy call
BATCH = 256
LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Several multilayer perceptrons (two hidden layers, SiLU) whose outputs are averaged.

    ``weights`` holds w0 (members, inputs, width), b0 (members, 1, width), w1, b1, w2, b2 likewise;
    ``mean`` and ``scale`` standardise the inputs, ``centre`` is added to the output.
    """

    mean: Array
    scale: Array
    centre: float
    weights: Mapping[str, Array]

    def predict(self, x: Array) -> Array:
        """Predict the log ratio: mean over the members."""
        out = np.zeros(len(x))
        w, members = self.weights, len(self.weights["b0"])
        for start in range(0, len(x), CHUNK):
            z = np.clip(
                (x[start : start + CHUNK] - self.mean) * self.scale, -INPUT_LIMIT, INPUT_LIMIT
            )
            for i in range(members):
                h = silu(z @ w["w0"][i] + w["b0"][i])
                h = silu(h @ w["w1"][i] + w["b1"][i])
                out[start : start + CHUNK] += (h @ w["w2"][i] + w["b2"][i])[:, 0] / members
        return out + self.centre

    def to_arrays(self) -> dict[str, Array]:
        """The networks as arrays by name, to be saved."""
        scaling = {"mean": self.mean, "scale": self.scale, "centre": np.array(self.centre)}
        return {**scaling, **self.weights}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Network:
        """The networks that ``to_arrays`` wrote."""
        scaling = ("mean", "scale", "centre")
        weights = {name: array for name, array in arrays.items() if name not in scaling}
        centre = float(arrays["centre"])
        return cls(mean=arrays["mean"], scale=arrays["scale"], centre=centre, weights=weights)


def silu(x: Array) -> Array:
    """x times its logistic function."""
    return x / (1.0 + np.exp(-np.clip(x, -30, 30)))


def fit_network(x: Array, log_ratio: Array, members: int, steps: int) -> Network:
    """Train by mean absolute error of the log ratio: AdamW, one-cycle rate, one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    spread = x.std(0)
    scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0).astype(np.float32)
    mean, centre = x.mean(0).astype(np.float32), float(np.median(log_ratio))
    inputs = torch.tensor(
        np.clip((x - mean) * scale, -INPUT_LIMIT, INPUT_LIMIT), dtype=torch.float32
    )
    target = torch.tensor(log_ratio - centre, dtype=torch.float32)
    weights = _train(inputs, target, members, steps)
    torch.set_num_threads(before)
    return Network(mean=mean, scale=scale, centre=centre, weights=weights)


def _train(
    inputs: torch.Tensor, target: torch.Tensor, members: int, steps: int
) -> dict[str, Array]:
    """Train all members at once, each on batches of its own; returns their weights."""
    torch.manual_seed(0)
    sizes = ((inputs.shape[1], WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
    weights: dict[str, torch.Tensor] = {}
    for i, (rows, cols) in enumerate(sizes):
        bound = rows**-0.5
        for name, shape in ((f"w{i}", (members, rows, cols)), (f"b{i}", (members, 1, cols))):
            weights[name] = ((torch.rand(shape) * 2 - 1) * bound).requires_grad_()
    optimizer = Adam([*weights.values()], LEARNING_RATE, steps, rising=0.1, decay=0.01)
    batch, act = min(BATCH, len(inputs)), torch.nn.functional.silu
    for _ in range(steps):
        index = torch.randint(0, len(inputs), (members, batch))
        h = act(torch.baddbmm(weights["b0"], inputs[index], weights["w0"]))
        h = act(torch.baddbmm(weights["b1"], h, weights["w1"]))
        guess = torch.baddbmm(weights["b2"], h, weights["w2"])[..., 0]
        loss = members * (guess - target[index]).abs().mean()
        loss.backward()
        optimizer.step()
    return {k: v.detach().numpy() for k, v in weights.items()}
