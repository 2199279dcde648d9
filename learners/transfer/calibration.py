"""A few measured rows of a GPU pull its forecasts close: a Gaussian process on their log errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHIFT = 0.3  # standard deviations of the log error: common to all rows of the GPU,
KIND = 0.1  # common to rows of one kind (op, dtype, ...),
NEAR = 0.2  # common to rows of like sizes,
REACH = 2.0  # within so many octaves,
LONG = 0.15  # common to rows that take about as long,
SPAN = 3.0  # within so many octaves,
NOISE = 0.12  # and of a single measurement


def points(at: np.ndarray, roofline_us: np.ndarray) -> np.ndarray:
    """Where rows are: their sizes (``residuals.coordinates``) and how long they take, in log2."""
    return np.asarray(np.c_[at, np.log2(roofline_us)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Log errors ``value`` of the uncalibrated model at measured ``points`` of one GPU."""

    kind: np.ndarray
    at: np.ndarray
    value: np.ndarray

    def correction(self, kind: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What to add to log forecasts, and by how much intervals shrink (1: not at all)."""
        if not len(kind):
            return np.zeros(0), np.ones(0)
        among = covariance(self.kind, self.at, self.kind, self.at)
        inverse = np.linalg.inv(among + NOISE**2 * np.eye(len(self.value)))
        cross = covariance(kind, at, self.kind, self.at)
        shift = cross @ inverse @ self.value
        prior = SHIFT**2 + KIND**2 + NEAR**2 + LONG**2
        left = prior - np.einsum("ij,jk,ik->i", cross, inverse, cross)
        return shift, np.sqrt(np.clip(left / prior, 0.0, 1.0)).clip(0.3)


def covariance(
    kind: np.ndarray, at: np.ndarray, other_kind: np.ndarray, other_at: np.ndarray
) -> np.ndarray:
    """Prior covariance of log errors between two sets of points."""
    same = kind[:, None] == other_kind[None, :]
    apart = (at[:, None, :] - other_at[None, :, :]) ** 2
    near = NEAR**2 * np.exp(-0.5 * apart[..., :-1].sum(-1) / REACH**2)
    long = LONG**2 * np.exp(-0.5 * apart[..., -1] / SPAN**2)
    return np.asarray(SHIFT**2 + KIND**2 * same + near + long, dtype=float)
