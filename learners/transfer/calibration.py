"""Corrects forecasts of a GPU by a few measured rows: a Gaussian process over their log errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.learners.features.table import Features, columns
from itercast.microbench.ops.family import Family, parameter_types

# Standard deviations of the log error that rows of one GPU share: all rows, rows of one kind (op,
# dtype...), rows of similar sizes, rows of similar duration; lengths are over log2.
SHIFT = assumed(__file__, "shift")
KIND = assumed(__file__, "kind")
SIZES, SIZES_LENGTH = assumed(__file__, "sizes"), assumed(__file__, "sizes_length")
DURATION, DURATION_LENGTH = assumed(__file__, "duration"), assumed(__file__, "duration_length")
NOISE = assumed(__file__, "noise")  # of a single measurement
MIN_INTERVAL_SHARE = assumed(__file__, "min_interval_share")


def coordinates(rows: pd.DataFrame, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each row (its parameters that are no sizes, as text) and log2(1 + sizes)."""
    params, sizes, kinds = columns(rows, family), [], np.full(len(rows), "", dtype=object)
    for name, kind in parameter_types(family.params).items():
        values = np.asarray(getattr(params, name))
        if kind in (int, float):
            sizes.append(np.log2(1.0 + values.astype(float)))
        else:
            kinds = kinds + "|" + values.astype(str).astype(object)
    return kinds, np.stack(sizes, axis=1).astype(np.float32)


def kind_keys(kind: np.ndarray, table: Features) -> np.ndarray:
    """Kinds extended by GPU, software and the conditions of measurement (threads, cold cache)."""
    keys = table["gpu"] + "|" + table["stack"]
    for name in ("threads", "cold"):
        codes, distinct = pd.factorize(table[name])
        keys = keys + np.array([f"|{value}" for value in distinct], dtype=object)[codes]
    return np.asarray(keys + "|" + kind)


def points(at: np.ndarray, roofline_us: np.ndarray) -> np.ndarray:
    """Coordinates of rows: log2 of their sizes (``coordinates``) and of the roofline."""
    return np.asarray(np.c_[at, np.log2(roofline_us)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Errors of the uncalibrated model at n measured rows of one GPU.

    ``value`` (n,): log(measured / forecast); ``kind`` (n,): key of op, dtype...; ``at`` (n, axes):
    coordinates as made by ``points``.
    """

    kind: np.ndarray
    at: np.ndarray
    value: np.ndarray

    def correction(self, kind: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what to add to log forecasts of rows, and the factor on their intervals' width.

        These are the Gaussian process's posterior mean, and its posterior standard deviation over
        the prior one. ``kind`` and ``at``: the rows to forecast, as in the fields.
        """
        if not len(kind):
            return np.zeros(0), np.ones(0)
        measured = covariance(self.kind, self.at, self.kind, self.at)
        inverse = np.linalg.inv(measured + NOISE**2 * np.eye(len(self.value)))
        cross = covariance(kind, at, self.kind, self.at)
        weights = cross @ inverse
        prior = SHIFT**2 + KIND**2 + SIZES**2 + DURATION**2
        posterior = prior - (weights * cross).sum(1)
        width = np.sqrt(np.clip(posterior / prior, 0.0, 1.0)).clip(MIN_INTERVAL_SHARE)
        return weights @ self.value, width


def covariance(
    kind: np.ndarray, at: np.ndarray, other_kind: np.ndarray, other_at: np.ndarray
) -> np.ndarray:
    """Return the prior covariance (n, m) of log errors between n rows and m other rows."""
    same = kind[:, None] == other_kind[None, :]
    axes = zip(at.T, other_at.T, strict=True)  # one by one, as rows are up to MAX_ROWS
    *by_size, by_duration = (np.subtract.outer(a, b) ** 2 for a, b in axes)
    sizes = SIZES**2 * np.exp(-0.5 * sum(by_size) / SIZES_LENGTH**2)
    duration = DURATION**2 * np.exp(-0.5 * by_duration / DURATION_LENGTH**2)
    return np.asarray(SHIFT**2 + KIND**2 * same + sizes + duration, dtype=float)
