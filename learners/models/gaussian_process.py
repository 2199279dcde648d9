"""Gaussian-process regression of log(time / roofline), for families of few, smooth curves.

Beyond the measured sizes it follows the trend, where trees stay constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.learners.models.interpolate import Array, interpolated
from itercast.learners.models.one_cycle import Adam

# Where the fit of hyperparameters starts: three terms (common trend, offsets of a curve, details).
INITIAL_AMPLITUDES = (0.4, 0.3, 0.15)  # standard deviations of the log time
INITIAL_NOISE = 0.05  # standard deviation of a measurement's log time
INITIAL_LENGTHS = (1.5, 1.0, 0.5)  # in standard deviations of a column times sqrt(columns)
LENGTH_PENALTY = 0.2  # weight of (log length - initial log length)^2 beside the likelihood
STEPS = 60  # of Adam
SAMPLE = 700  # points of one step
MERGE_DISTANCE = 0.5  # log2 units
MAX_POINTS = 3500  # kept at most; predicting takes time in proportion
STUDENT_T_FREEDOM = assumed(__file__, "student_t_freedom")
CHUNK = 128  # rows at a time, so that their covariances stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Covariance of two points: sum over terms of amplitude^2 * exp(-|(a - b) * inverse|^2 / 2).

    ``inverse`` holds inverse length scales (terms, inputs), ``amplitude`` (terms,); ``noise`` is
    the standard deviation of a measurement. The first ``along`` inputs are log2 of sizes that
    differ by constants within a curve (0: there are no curves). Below and above ``ends`` of the
    first of them (not in log2) the log ratio is constant.
    """

    inverse: Array
    amplitude: Array
    noise: float
    along: int = 0
    ends: tuple[float, float] = (0.0, np.inf)

    def saturated(self, z: Array) -> Array:
        """Inputs (rows, inputs) with the sizes saturating smoothly beyond ``ends``.

        size -> (size + low) / (1 + size / high), in log2; all ``along`` inputs shift by as much.
        """
        out, (low, high) = z.astype(float), self.ends
        if self.along:
            first = np.exp2(out[:, 0])
            bent = np.log2((first + low) / (1 + first / high))
            out[:, : self.along] += (bent - out[:, 0])[:, None]
        return out

    def __call__(self, a: Array, b: Array) -> Array:
        """Covariance of the saturated points ``a`` (rows) with ``b`` (columns)."""
        total = np.zeros((len(a), len(b)), dtype=a.dtype)
        for inverse, amplitude in zip(self.inverse, self.amplitude, strict=True):
            exponent = left_factor(a * inverse) @ right_factor(b * inverse)
            total += amplitude**2 * np.exp(exponent)
        return total


def left_factor(u: Array) -> Array:
    """Left matrix of a product: left_factor(u) @ right_factor(v) = -|u_i - v_j|^2 / 2."""
    own = -0.5 * (u * u).sum(1, keepdims=True)
    return np.hstack([u, own, np.ones_like(own)])


def right_factor(v: Array) -> Array:
    """Right matrix of the product that ``left_factor`` describes."""
    own = -0.5 * (v * v).sum(1, keepdims=True)
    return np.hstack([v, np.ones_like(own), own]).T


@dataclass(frozen=True, kw_only=True)
class GaussianProcess:
    """Mean of a Gaussian process on the ``columns`` of x: centre + kernel(x, at) @ weight."""

    columns: Array
    kernel: Kernel
    at: Array
    weight: Array
    centre: float

    @cached_property
    def _flags(self) -> tuple[Array, Array]:
        """Mask of the columns that are 0 or 1 at every point; random weights to hash them by."""
        flags = ((self.at == 0) | (self.at == 1)).all(0)
        return flags, np.random.default_rng(0).random(int(flags.sum()))

    @cached_property
    def _known(self) -> tuple[Array, list[tuple[Array, ...]]]:
        """Computes once what every prediction needs of the training points, in float32.

        First the mean of the inputs that are not flags (0 or 1). Then for each term of the kernel:
        inverse lengths, ``right_factor`` of the other inputs, that of the flags, and the weights.
        """
        flags, _ = self._flags
        shift, parts = self.at[:, ~flags].mean(0), []  # near 0 float32 is fine enough
        for inverse, amplitude in zip(self.kernel.inverse, self.kernel.amplitude, strict=True):
            right = right_factor((self.at[:, ~flags] - shift) * inverse[~flags])
            right_flags = right_factor(self.at[:, flags] * inverse[flags])
            weight = amplitude**2 * self.weight
            parts.append((inverse, *(a.astype(np.float32) for a in (right, right_flags, weight))))
        return shift, parts

    def predict(self, x: Array) -> Array:
        """Predict the log ratio of each row of encoded features."""
        z, along = self.kernel.saturated(x[:, self.columns]), self.kernel.along
        return interpolated(z, along, self.predict_rows) if along else self.predict_rows(z)

    def predict_rows(self, z: Array) -> Array:
        """Predict the log ratio of each row of ``z``, inputs after ``Kernel.saturated``.

        The kernel's exponent is a sum over inputs: the part of flags (inputs of 0 or 1) is computed
        once for each combination of flags that rows share.
        """
        out = np.full(len(z), self.centre)
        (flags, hash_weights), (shift, parts) = self._flags, self._known
        hashes = z[:, flags] @ hash_weights
        first, kind = np.unique(hashes, return_index=True, return_inverse=True)[1:]
        kinds = z[first][:, flags]  # the distinct combinations of flags
        for inverse, right, right_flags, weight in parts:
            left = left_factor((z[:, ~flags] - shift) * inverse[~flags]).astype(np.float32)
            left_flags = left_factor(kinds * inverse[flags]).astype(np.float32)
            for start in range(0, len(z), CHUNK):
                rows = slice(start, start + CHUNK)
                present, which = np.unique(kind[rows], return_inverse=True)
                exponent = left[rows] @ right
                exponent += (left_flags[present] @ right_flags)[which]
                out[rows] += np.exp(exponent, out=exponent) @ weight
        return out

    def to_arrays(self) -> dict[str, Array]:
        """The process as arrays by name, to be saved."""
        return {
            "columns": self.columns,
            "inverse": self.kernel.inverse,
            "amplitude": self.kernel.amplitude,
            "noise": np.array(self.kernel.noise),
            "at": self.at.astype(np.float32),
            "weight": self.weight.astype(np.float32),
            "centre": np.array(self.centre),
            "along": np.array(self.kernel.along),
            "ends": np.array(self.kernel.ends),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> GaussianProcess:
        """The process that ``to_arrays`` wrote."""
        low, high = arrays["ends"]
        kernel = Kernel(
            inverse=arrays["inverse"],
            amplitude=arrays["amplitude"],
            noise=float(arrays["noise"]),
            along=int(arrays["along"]),
            ends=(float(low), float(high)),
        )
        return cls(
            columns=arrays["columns"],
            kernel=kernel,
            at=arrays["at"],
            weight=arrays["weight"],
            centre=float(arrays["centre"]),
        )


def initial_length_scales(x: Array) -> dict[int, tuple[float, ...]]:
    """Length scales to start from, one per term, of every column that varies."""
    spread = x.std(0)
    used = np.flatnonzero(spread > 1e-6)
    root = len(used) ** 0.5
    return {int(i): tuple(float(r * spread[i] * root) for r in INITIAL_LENGTHS) for i in used}


def merge_points(z: Array, log_ratio: Array, distance: float) -> tuple[Array, Array, Array]:
    """Merge points of one grid cell: mean position, median value, how many (4 at most)."""
    cell = np.unique(np.round(z / distance), axis=0, return_inverse=True)[1].reshape(-1)
    order, count = np.argsort(cell, kind="stable"), np.bincount(cell)
    ends = np.cumsum(count)[:-1]
    positions = np.stack([part.mean(0) for part in np.split(z[order].astype(float), ends)])
    values = np.array([np.median(part) for part in np.split(log_ratio[order], ends)])
    drawn = np.random.default_rng(0).permutation(len(positions))[:MAX_POINTS]
    return positions[drawn], values[drawn], np.minimum(count[drawn], 4.0)


def learn_kernel(
    x: Array,
    log_ratio: Array,
    length_scales: Mapping[int, Sequence[float]],
    merge_distance: float,
) -> Kernel:
    """Fit length scales, amplitudes and noise of a kernel by marginal likelihood (Adam).

    ``length_scales``: by column of x, the initial length of each term. Distance from them is
    penalised by LENGTH_PENALTY * (log length - initial log length)^2.
    """
    z, value, count = merge_points(x[:, list(length_scales)], log_ratio, merge_distance)
    start = torch.tensor(np.log(np.array(list(length_scales.values())).T)).contiguous()
    lengths, scales = start.clone(), torch.tensor(np.log([*INITIAL_AMPLITUDES, INITIAL_NOISE]))
    points, target = torch.tensor(z), torch.tensor(value - np.median(value))
    spread = torch.tensor(1 / count)
    optimizer = Adam([lengths, scales], 0.1, STEPS, rising=0.2)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        sample = torch.tensor(rng.permutation(len(z))[:SAMPLE])
        gradients = _slopes(points[sample], target[sample], spread[sample], lengths, scales)
        lengths.grad, scales.grad = gradients
        lengths.grad += 2 * LENGTH_PENALTY * (lengths - start)
        optimizer.step()
    fitted_scales = np.exp(scales.numpy())
    return Kernel(
        inverse=np.exp(-lengths.numpy()),
        amplitude=fitted_scales[:-1],
        noise=float(fitted_scales[-1]),
    )


def _slopes(x: Any, target: Any, spread: Any, lengths: Any, scales: Any) -> tuple[Any, Any]:
    """Derivatives of the negative log marginal likelihood by log lengths and log scales.

    L = (y' K^-1 y + log det K) / 2, so that dL/dK = (K^-1 - K^-1 y y' K^-1) / 2. A term of K is
    E_ij = exp(2 s - sum_d (u_id - u_jd)^2 / 2) with u = x exp(-l); torch's autograd would take
    twice as long.
    """
    noise = torch.exp(2 * scales[-1]) * spread
    scaled = [x * torch.exp(-log_length) for log_length in lengths]
    terms = []
    for u, scale in zip(scaled, scales, strict=False):  # the last scale is the noise's
        squared_norm = (u * u).sum(1)
        squared_distance = (squared_norm[:, None] + squared_norm - 2 * u @ u.T).clamp_min_(0)
        terms.append(squared_distance.mul_(-0.5).add_(2 * scale).exp_())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.diag(noise) + sum(terms)))
    solved = inverse @ target
    by_covariance = 0.5 * (inverse - solved[:, None] * solved)
    by_noise = 2 * (by_covariance.diagonal() * noise).sum()
    by_term = [by_covariance * term for term in terms]
    by_length = [
        2 * (u * (u * w.sum(1)[:, None] - w @ u)).sum(0)
        for u, w in zip(scaled, by_term, strict=True)
    ]
    by_scale = torch.stack([*(2 * w.sum() for w in by_term), by_noise])
    return torch.stack(by_length), by_scale


def fit_process(
    x: Array,
    log_ratio: Array,
    length_scales: Mapping[int, Sequence[float]],
    kernel: Kernel | None = None,
    merge_distance: float = MERGE_DISTANCE,
) -> GaussianProcess:
    """Fit a process to the rows, with Student's t noise: outliers count less.

    Four steps of iterative reweighting; without ``kernel`` one is learned first. Far from all rows
    the forecast is the roofline where the kernel has curves, else their median ratio to it.
    """
    from scipy.linalg import solve  # lazy: 0.3 s, and pricing does without

    kernel = kernel or learn_kernel(x, log_ratio, length_scales, merge_distance)
    inputs = kernel.saturated(x[:, list(length_scales)])
    at, value, count = merge_points(inputs, log_ratio, merge_distance)
    centre = 0.0 if kernel.along else float(np.median(value))
    covariance, variance = kernel(at, at), kernel.noise**2 / count
    inflation, freedom = np.ones(len(at)), STUDENT_T_FREEDOM
    for _ in range(4):
        noisy = covariance + np.diag(variance * inflation)
        solved = solve(noisy, value - centre, assume_a="pos", check_finite=False)
        residual = solved * variance * inflation
        inflation = (freedom + residual**2 / variance) / (freedom + 1)
    return GaussianProcess(
        columns=np.array(list(length_scales)),
        kernel=kernel,
        at=at,
        weight=solved,
        centre=centre,
    )
