"""What is known of a machine: a normal distribution of the logs of its factors.

Between machines log factors x differ by a spread, fitted over sources of measured steps
(typical.yaml); a typical machine is as priced, x = 0. A measured step of time t tells of its own:

    log(t / t0) = J . x + share * model + row

with t0 the forecast on a typical machine and J, the anchor's sensitivity, the derivative of the
log forecast by the log factors. ``model`` is one number for each model on a machine: how much
longer all of its parts take. ``row`` differs from step to step. All are normal, so the posterior is
normal, and each anchor narrows it. Far steps are more often than a normal distribution has them, so
intervals end at more deviations than its own.

``share`` is 1 for a whole step. A step that was measured in parts (messages that compute waits for,
the rest) is an anchor for each part, with its share of ``model`` and of the variance of ``row``, so
that the parts together tell what the step tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, sqrt

import numpy as np

from itercast.compose.machines.factors import NAMES, Factors

DEVIATES = 1.2816  # no assumption: beyond so many a tenth of a normal distribution is
EVERYWHERE = np.array([name != "ranks" for name in NAMES], dtype=float)  # a model's share of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How machines differ: standard deviations of log factors, in the order of ``NAMES``.

    ``model``: standard deviation between models on one machine; ``row``: between steps of a model.
    ``deviates``: how many standard deviations of its log time the 80 % interval of a step ends from
    its forecast.
    """

    spread: tuple[float, ...]
    model: float
    row: float
    deviates: float = DEVIATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A measured step, or a part of one, beside its forecast on the typical machine.

    ``log_ratio``: log(measured / forecast); ``sensitivity``: J, in the order of ``NAMES``. Of a
    part they are what it adds to those of the step; ``share``: how much of the step it is.
    """

    model: str
    sensitivity: tuple[float, ...]
    log_ratio: float
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A normal distribution of log factors and of the models measured on the machine, jointly.

    ``mean`` and ``covariance``: first of log factors in the order of ``NAMES``, then of ``models``.
    ``measured``: runs that were measured, by ``itercast.extras.anchors.infer_machine.run_name``.
    """

    typical: Spread
    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    models: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    @classmethod
    def new(cls, typical: Spread) -> Machine:
        """A machine of which nothing is known."""
        covariance = np.diag(np.square(typical.spread))
        return cls(typical=typical, mean=(0.0,) * len(NAMES), covariance=_rows(covariance))

    def factors(self, model: str = "") -> Factors:
        """The expected factors, for a model with how much longer it takes on this machine."""
        logs = np.array(self.mean[: len(NAMES)])
        if model in self.models:
            logs = logs + self.mean[len(NAMES) + self.models.index(model)] * EVERYWHERE
        return Factors.of_logs(logs.tolist())

    def log_deviation(self, sensitivity: Sequence[float], model: str) -> float:
        """Standard deviation of the log of a measured step, by its sensitivity to the factors."""
        known = self._with(model)
        j = known._direction(sensitivity, model)
        return sqrt(float(j @ np.array(known.covariance) @ j) + self.typical.row**2)

    def half_width(
        self, sensitivity: Sequence[float], model: str = "", other: float = 0.0
    ) -> float:
        """Half width of the 80 % interval of a step, in log time.

        ``other``: standard deviation of its log time by what no machine tells of.
        """
        return self.typical.deviates * hypot(self.log_deviation(sensitivity, model), other)

    def told(self, anchors: Sequence[Anchor]) -> Machine:
        """The machine after measured steps, whose forecasts are those of the typical machine."""
        known = self
        for anchor in anchors:
            known = known._with(anchor.model)._told_one(anchor)
        return known

    def _with(self, model: str) -> Machine:
        """The same machine with a place for a model of which nothing was measured."""
        if model in self.models:
            return self
        size = len(self.mean)
        covariance = np.zeros((size + 1, size + 1))
        covariance[:size, :size] = self.covariance
        covariance[size, size] = self.typical.model**2
        return replace(
            self,
            mean=(*self.mean, 0.0),
            covariance=_rows(covariance),
            models=(*self.models, model),
        )

    def _direction(
        self, sensitivity: Sequence[float], model: str, share: float = 1.0
    ) -> np.ndarray:
        own = [share * (name == model) for name in self.models]
        return np.array([*sensitivity, *own])

    def _told_one(self, anchor: Anchor) -> Machine:
        """Update by one anchor (a Kalman filter's step)."""
        j = self._direction(anchor.sensitivity, anchor.model, anchor.share)
        mean, covariance = np.array(self.mean), np.array(self.covariance)
        gain = covariance @ j / (j @ covariance @ j + anchor.share * self.typical.row**2)
        mean = mean + gain * (anchor.log_ratio - j @ mean)
        narrowed = covariance - np.outer(gain, j @ covariance)
        return replace(self, mean=tuple(mean.tolist()), covariance=_rows(narrowed))

    def interval(self, name: str) -> tuple[float, float, float]:
        """A factor over that of a typical machine: expected, and bounds of its 80 % interval."""
        at = NAMES.index(name)
        wide = self.typical.deviates * sqrt(max(0.0, self.covariance[at][at]))
        log = self.mean[at]
        return exp(log), exp(log - wide), exp(log + wide)


def _rows(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))
