"""Simple baselines of the public benchmark: roofline, nearest rows, MLP, alpha-beta, interpolation.

Each is fitted on the rows ``known`` of a table and forecasts the rows ``asked``, in us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from itercast.learners.models.baselines import (
    nearest_arrays,
    nearest_us,
    roofline_arrays,
    roofline_us,
)
from itercast.learners.models.training_table import Table

KNOWN_ROWS = 40_000
CURVE = ["gpu", "op", "world_size", "ranks_per_node"]
Index = np.ndarray
Baseline = Callable[[Table, pd.DataFrame, Index, Index], np.ndarray]


def _some(known: Index) -> Index:
    return np.asarray(np.random.default_rng(0).permutation(known)[:KNOWN_ROWS])


def roofline(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Roofline time, scaled by the median ratio of measured to roofline time of the known rows."""
    fitted = roofline_arrays(table.take(known).log_ratio)
    return np.asarray(roofline_us(fitted, table.x[asked], table.roofline_us[asked]))


def nearest(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Predict times: roofline * mean ratio (time / roofline) of the three nearest known rows.

    Nearest in standardised features.
    """
    train = table.take(_some(known))
    fitted = nearest_arrays(train.x, train.log_ratio)
    return np.asarray(nearest_us(fitted, table.x[asked], table.roofline_us[asked]))


def mlp(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """A small network that predicts utilisation; time = roofline / utilisation, as NeuSight does.

    Two hidden layers of 128, a sigmoid at the end, absolute percentage error as the loss; features
    include waves of tiles.
    """
    import torch  # lazy: only the benchmark trains a network

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train = table.take(_some(known))
    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    x = np.clip((train.x - mean) / spread, -5, 5)
    lowest = float(np.quantile(train.log_ratio, 0.001))
    net = _trained_network(x, np.exp(train.log_ratio - lowest))
    z = torch.tensor(np.clip((table.x[asked] - mean) / spread, -5, 5), dtype=torch.float32)
    with torch.no_grad():
        utilisation = net(z)[:, 0].clamp_min(1e-3).double().numpy()
    torch.set_num_threads(threads)
    return np.asarray(table.roofline_us[asked] * np.exp(lowest) / utilisation)


def _trained_network(features: np.ndarray, roofline_ratio: np.ndarray) -> Any:
    """Train a network to predict utilisation = 1 / ratio of measured to roofline time."""
    import torch  # lazy, as above

    torch.manual_seed(0)
    x = torch.tensor(features, dtype=torch.float32)
    ratio = torch.tensor(roofline_ratio, dtype=torch.float32)
    width = 128
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 1),
        torch.nn.Sigmoid(),
    )
    steps, batch = max(600, min(3000, 10 * len(x) // 512)), min(512, len(x))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        index = torch.randint(0, len(x), (batch,))
        utilisation = net(x[index])[:, 0].clamp_min(1e-3)
        loss = (1 / (utilisation * ratio[index]) - 1).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net


def alpha_beta(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """time = alpha + beta * bytes for each curve, by least squares of the relative error."""

    def fitted(size: np.ndarray, time_us: np.ndarray, at: np.ndarray) -> np.ndarray:
        a = np.c_[1 / time_us, size / time_us]
        coefficients = np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0]
        line = coefficients[0] + coefficients[1] * at
        return np.asarray(np.maximum(line, 0.5 * time_us.min()))

    return _by_curve(rows, known, asked, fitted)


def interpolation(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Linear interpolation of log time over log bytes along each curve; extrapolated linearly."""

    def fitted(size: np.ndarray, time_us: np.ndarray, at: np.ndarray) -> np.ndarray:
        line = pd.Series(np.log(time_us)).groupby(np.log(size)).mean()
        x, y = line.index.to_numpy(), line.to_numpy()
        if len(x) < 2:
            return np.full(len(at), np.exp(y[0]))
        i = np.clip(np.searchsorted(x, np.log(at)) - 1, 0, len(x) - 2)
        slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i])
        return np.asarray(np.exp(y[i] + slope * (np.log(at) - x[i])))

    return _by_curve(rows, known, asked, fitted)


def _by_curve(
    rows: pd.DataFrame,
    known: Index,
    asked: Index,
    fitted: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Fit each curve (GPU, collective, ranks) over message size and evaluate it at asked rows.

    A curve without known rows takes the nearest known curve of the same collective.
    """
    train, test = rows.iloc[known], rows.iloc[asked].reset_index(drop=True)
    curves = {key: part for key, part in train.groupby(CURVE)}
    out = np.full(len(test), np.nan)
    for key, part in test.groupby(CURVE):
        mine = curves.get(key)
        if mine is None:
            mine = _closest(curves, key)  # type: ignore[arg-type]
        if mine is None:
            continue
        size, time_us = (mine[c].to_numpy(dtype=float) for c in ("message_bytes", "time_us"))
        at = part["message_bytes"].to_numpy(dtype=float)
        out[part.index] = fitted(size, time_us, at)
    return out


def _closest(
    curves: dict[tuple[object, ...], pd.DataFrame], key: tuple[object, ...]
) -> pd.DataFrame | None:
    """The known curve of the same op with the nearest rank count, on the same GPU if possible."""

    def distance(other: tuple[object, ...]) -> float:
        ranks = abs(np.log2(float(other[2])) - np.log2(float(key[2])))  # type: ignore[arg-type]
        return float(ranks) + 10.0 * (other[0] != key[0])

    same = [other for other in curves if other[1] == key[1]]
    return curves[min(same, key=distance)] if same else None


BASELINES: dict[str, Baseline] = {
    "roofline": roofline,
    "nearest": nearest,
    "mlp": mlp,
    "alpha_beta": alpha_beta,
    "interpolation": interpolation,
}
