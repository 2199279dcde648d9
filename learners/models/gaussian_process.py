"""A Gaussian process for families of few smooth curves: it carries on where trees stay level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import solve

from learners.models.interpolate import interpolated

Array = Any  # numpy arrays of float
AMPLITUDES = (0.4, 0.3, 0.15)  # what all share, offsets of a curve, details
NOISE = 0.05
REACH = (1.5, 1.0, 0.5)  # lengths where the family states none, in spreads times root of features
GRAIN = 0.5  # octaves
TIE = 0.2  # how firmly lengths stay near those the family states
STEPS = 60
SAMPLE = 700  # points of one step
POINTS = 3500  # at most so many are kept; predicting takes as long as there are points
FREEDOM = 3.0  # of Student's t: single measurements go astray
CHUNK = 128  # rows at a time, so that their covariances stay in the cache
FAINT = -14.0  # log covariance of points of other kinds that are as good as unrelated


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Squared exponentials, summed: ``inverse`` lengths (parts, inputs), ``amplitude`` (parts,).

    The first ``along`` inputs, log2, grow alike along curves; none do where it is 0. Beyond
    ``ends`` of the first of them nothing changes any more.
    """

    inverse: Array
    amplitude: Array
    noise: float
    along: int = 0
    ends: tuple[float, float] = (0.0, np.inf)

    def levelled(self, z: Array) -> Array:
        """Inputs (rows, inputs) as the covariance sees them: bent level beyond the ends."""
        out, (low, high) = z.astype(float), self.ends
        if self.along:
            first = np.exp2(out[:, 0])
            bent = np.log2((first + low) / (1 + first / high))
            out[:, : self.along] += (bent - out[:, 0])[:, None]
        return out

    def __call__(self, a: Array, b: Array) -> Array:
        """Covariance of the levelled points ``a`` (rows) with ``b`` (columns)."""
        total = np.zeros((len(a), len(b)), dtype=a.dtype)
        for inverse, amplitude in zip(self.inverse, self.amplitude, strict=True):
            exponent = left_factor(a * inverse) @ right_factor(b * inverse)
            total += amplitude**2 * np.exp(exponent)
        return total


def left_factor(u: Array) -> Array:
    """Times ``right_factor(v)`` -|u - v|^2 / 2 of every row of u with every row of v."""
    own = -0.5 * (u * u).sum(1, keepdims=True)
    return np.hstack([u, own, np.ones_like(own)])


def right_factor(v: Array) -> Array:
    """See ``left_factor``."""
    own = -0.5 * (v * v).sum(1, keepdims=True)
    return np.hstack([v, np.ones_like(own), own]).T


@dataclass(frozen=True, kw_only=True)
class Process:
    """Mean of a Gaussian process: ``centre`` + kernel(x, at) @ weight on the inputs ``columns``."""

    columns: Array
    kernel: Kernel
    at: Array
    weight: Array
    centre: float

    @cached_property
    def _flags(self) -> Array:
        """Which columns are 0 or 1 at every point, and numbers that name their patterns."""
        flags = ((self.at == 0) | (self.at == 1)).all(0)
        return flags, np.random.default_rng(0).random(int(flags.sum()))

    @cached_property
    def _known(self) -> tuple[Array, list[tuple[Array, ...]]]:
        """What is subtracted from inputs that are no flags; by part of the kernel the points.

        Of each part its inverse lengths, right factors of numbers and of flags, and weights.
        """
        flags, _ = self._flags
        shift, parts = self.at[:, ~flags].mean(0), []  # near 0 float32 is fine enough
        for inverse, amplitude in zip(self.kernel.inverse, self.kernel.amplitude, strict=True):
            v = right_factor((self.at[:, ~flags] - shift) * inverse[~flags])
            q = right_factor(self.at[:, flags] * inverse[flags])
            weight = amplitude**2 * self.weight
            parts.append((inverse, *(t.astype(np.float32) for t in (v, q, weight))))
        return shift, parts

    def predict(self, x: Array) -> Array:
        """Log ratio of each row of encoded features."""
        z, along = self.kernel.levelled(x[:, self.columns]), self.kernel.along
        return interpolated(z, along, self.of_kinds) if along else self.of_numbers(z)

    def of_numbers(self, z: Array) -> Array:
        """Log ratio of rows of inputs, most of which are numbers of their own."""
        out = np.full(len(z), self.centre)
        (flags, names), (shift, parts) = self._flags, self._known
        key = z[:, flags] @ names
        first, kind = np.unique(key, return_index=True, return_inverse=True)[1:]
        kinds = z[first][:, flags]
        for inverse, v, q, weight in parts:
            u = left_factor((z[:, ~flags] - shift) * inverse[~flags]).astype(np.float32)
            p = left_factor(kinds * inverse[flags]).astype(np.float32)
            for start in range(0, len(z), CHUNK):
                rows = slice(start, start + CHUNK)
                mine, which = np.unique(kind[rows], return_inverse=True)
                near = u[rows] @ v
                near += (p[mine] @ q)[which]
                out[rows] += np.exp(near, out=near) @ weight
        return out

    def of_kinds(self, z: Array) -> Array:
        """Log ratio of rows of inputs; those of a kind share all that does not grow along curves.

        Points too far from a kind to count are left out.
        """
        out = np.full(len(z), self.centre)
        still = np.arange(z.shape[1]) >= self.kernel.along
        key = z[:, still] @ np.random.default_rng(0).random(int(still.sum()))
        first, kind = np.unique(key, return_index=True, return_inverse=True)[1:]
        members = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
        shift = self.at.mean(0)  # near 0 float32 is fine enough
        for inverse, amplitude in zip(self.kernel.inverse, self.kernel.amplitude, strict=True):
            near, known = ((t - shift) * inverse for t in (z, self.at))
            p, q = left_factor(near[first][:, still]), right_factor(known[:, still])
            u = left_factor(near[:, ~still]).astype(np.float32)
            v = right_factor(known[:, ~still]).astype(np.float32)
            for rows, apart in zip(members, p @ q, strict=True):
                kept = np.flatnonzero(apart > FAINT)
                weight = amplitude**2 * self.weight[kept] * np.exp(apart[kept])
                for start in range(0, len(rows) if len(kept) else 0, CHUNK):
                    some = rows[start : start + CHUNK]
                    out[some] += np.exp(u[some] @ v[:, kept]) @ weight.astype(np.float32)
        return out

    def to_arrays(self) -> dict[str, Array]:
        """Arrays by name, for a file."""
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
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Process:
        """As written by to_arrays."""
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


def every_feature(x: Array) -> dict[int, tuple[float, ...]]:
    """Columns that vary, each with lengths of a few times its spread."""
    spread = x.std(0)
    used = np.flatnonzero(spread > 1e-6)
    return {int(i): tuple(float(r * spread[i] * len(used) ** 0.5) for r in REACH) for i in used}


def merged(z: Array, log_ratio: Array, grain: float = GRAIN) -> tuple[Array, Array, Array]:
    """Points within a ``grain`` made one: where, the median there, how many (at most 4)."""
    index = np.unique(np.round(z / grain), axis=0, return_inverse=True)[1].reshape(-1)
    order, count = np.argsort(index, kind="stable"), np.bincount(index)
    ends = np.cumsum(count)[:-1]
    at = np.stack([part.mean(0) for part in np.split(z[order].astype(float), ends)])
    value = np.array([np.median(part) for part in np.split(log_ratio[order], ends)])
    kept = np.random.default_rng(0).permutation(len(at))[:POINTS]
    return at[kept], value[kept], np.minimum(count[kept], 4.0)


def learn_kernel(
    x: Array, log_ratio: Array, curve: Mapping[int, Sequence[float]], grain: float = GRAIN
) -> Kernel:
    """Lengths and amplitudes of greatest marginal likelihood, near the lengths of ``curve``.

    ``curve`` names columns of x and a starting length of each part.
    """
    import torch  # lazy: pricing needs numpy only

    z, value, count = merged(x[:, list(curve)], log_ratio, grain)
    start = torch.tensor(np.log(np.array(list(curve.values())).T))
    lengths = start.clone().requires_grad_()
    scales = torch.tensor(np.log([*AMPLITUDES, NOISE])).requires_grad_()
    points, target = torch.tensor(z), torch.tensor(value - np.median(value))
    spread = torch.tensor(1 / count)
    optimizer = torch.optim.Adam([lengths, scales], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS, pct_start=0.2)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        some = torch.tensor(rng.permutation(len(z))[:SAMPLE])
        covariance = torch.diag(torch.exp(2 * scales[-1]) * spread[some])
        for part in range(len(AMPLITUDES)):
            u = points[some] * torch.exp(-lengths[part])
            square = (u * u).sum(1)
            apart = (square[:, None] + square - 2 * u @ u.T).clamp_min(0)
            covariance = covariance + torch.exp(2 * scales[part] - 0.5 * apart)
        root = torch.linalg.cholesky(covariance)
        solved = torch.cholesky_solve(target[some][:, None], root)[:, 0]
        loss = 0.5 * target[some] @ solved + torch.log(torch.diagonal(root)).sum()
        loss = loss + TIE * ((lengths - start) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found = np.exp(scales.detach().numpy())
    return Kernel(
        inverse=np.exp(-lengths.detach().numpy()), amplitude=found[:-1], noise=float(found[-1])
    )


def fit_process(
    x: Array,
    log_ratio: Array,
    curve: Mapping[int, Sequence[float]],
    kernel: Kernel | None = None,
    grain: float = GRAIN,
) -> Process:
    """A process through the rows; points far off the others count less (Student's t)."""
    kernel = kernel or learn_kernel(x, log_ratio, curve, grain)
    at, value, count = merged(kernel.levelled(x[:, list(curve)]), log_ratio, grain)
    centre = float(np.median(value))
    covariance, variance = kernel(at, at), kernel.noise**2 / count
    doubt = np.ones(len(at))
    for _ in range(4):
        noisy = covariance + np.diag(variance * doubt)
        solved = solve(noisy, value - centre, assume_a="pos", check_finite=False)
        left = solved * variance * doubt
        doubt = (FREEDOM + left**2 / variance) / (FREEDOM + 1)
    return Process(
        columns=np.array(list(curve)),
        kernel=kernel,
        at=at,
        weight=solved,
        centre=centre,
    )
