"""Attributes the error of iterations to parts of the forecast: kernels, host, communication..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from itercast.eval.iteration_parts import PARTS
from itercast.eval.results import CaseResult

PRIOR = 0.2  # standard deviation of a part's factor before any iteration was seen
NOISE = 0.05  # of an iteration's error that no part explains


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorParts:
    """Parts of a forecast and what to add to each, in % of the measured iteration.

    Of one case, or the mean of several. ``forecast`` and ``correction`` are by part (PARTS);
    sum(forecast) + sum(correction) + unexplained = 100.
    """

    name: str
    forecast: dict[str, float]
    correction: dict[str, float]
    unexplained: float


def factors(results: Sequence[CaseResult]) -> dict[str, float]:
    """For each part, the factor on its forecast time, minus 1, that explains errors best.

    Ridge regression of (measured - predicted) / measured on the parts' shares: errors have the
    standard deviation NOISE, factors are drawn towards 1 as by a normal distribution around it with
    PRIOR. A part that hardly varies between cases therefore takes little of the error.
    """
    share, error = _shares(results)
    square = share.T @ share / NOISE**2 + np.eye(len(PARTS)) / PRIOR**2
    solution = np.linalg.solve(square, share.T @ error / NOISE**2)
    return dict(zip(PARTS, solution.tolist(), strict=True))


def _shares(results: Sequence[CaseResult]) -> tuple[np.ndarray, np.ndarray]:
    """Parts over the measured time, shape (cases, parts), and (measured - predicted) / measured."""
    share = [[r.parts_us.get(p, 0.0) / r.measured_us for p in PARTS] for r in results]
    error = [1 - r.predicted_us / r.measured_us for r in results]
    return np.array(share), np.array(error)


def error_parts(results: Sequence[CaseResult], name: str, factor: dict[str, float]) -> ErrorParts:
    """The mean parts of some cases, corrected by ``factor`` of each part (from ``factors``)."""
    share, error = (100 * values.mean(axis=0) for values in _shares(results))
    correction = {p: factor[p] * s for p, s in zip(PARTS, share.tolist(), strict=True)}
    return ErrorParts(
        name=name,
        forecast=dict(zip(PARTS, share.tolist(), strict=True)),
        correction=correction,
        unexplained=float(error) - sum(correction.values()),
    )
