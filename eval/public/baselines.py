"""Baselines of the public benchmark: what a reader would try first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from learners.models import regressors
from learners.models.regressors import Table

KNOWN_ROWS = 40_000
CURVE = ["gpu", "op", "world_size", "ranks_per_node"]
Index = np.ndarray
Baseline = Callable[[Table, pd.DataFrame, Index, Index], np.ndarray]


def _some(known: Index) -> Index:
    return np.asarray(np.random.default_rng(0).permutation(known)[:KNOWN_ROWS])


def roofline(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """The roofline times the median ratio of the known rows."""
    return np.asarray(
        regressors.predict_roofline(table.take(known), None, table.roofline_us[asked])
    )


def nearest(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Three nearest rows in standardised features."""
    train = table.take(_some(known))
    return np.asarray(regressors.predict_nearest(train, table.x[asked], table.roofline_us[asked]))


def mlp(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """In NeuSight's manner: a small network predicts the utilisation, time is roofline over it.

    Two hidden layers of 128, a sigmoid at the end, absolute percentage error as the loss; features
    include waves of tiles.
    """
    import torch  # lazy: only the benchmark trains a network

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train = table.take(_some(known))
    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    x = torch.tensor(np.clip((train.x - mean) / spread, -5, 5), dtype=torch.float32)
    least = float(np.quantile(train.log_ratio, 0.001))
    ratio = torch.tensor(np.exp(train.log_ratio - least), dtype=torch.float32)
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
    z = torch.tensor(np.clip((table.x[asked] - mean) / spread, -5, 5), dtype=torch.float32)
    with torch.no_grad():
        utilisation = net(z)[:, 0].clamp_min(1e-3).double().numpy()
    torch.set_num_threads(threads)
    return np.asarray(table.roofline_us[asked] * np.exp(least) / utilisation)


def alpha_beta(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """alpha + beta * bytes per curve, least squares of the relative error."""

    def fitted(size: np.ndarray, time_us: np.ndarray, at: np.ndarray) -> np.ndarray:
        a = np.c_[1 / time_us, size / time_us]
        coefficients = np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0]
        line = coefficients[0] + coefficients[1] * at
        return np.asarray(np.maximum(line, 0.5 * time_us.min()))

    return _by_curve(rows, known, asked, fitted)


def interpolation(table: Table, rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Linear in the logarithms along a curve, its last slope beyond the ends."""

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
    """Fit each curve of a collective; a curve never seen takes the op's nearest known one."""
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
    """The curve of the same op with the nearest count of ranks, on the same GPU if there is one."""

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
