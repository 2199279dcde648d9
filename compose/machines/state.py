"""What is known of a machine: a normal distribution of the logs of its factors.

Between machines log factors x differ by a spread, fitted over sources of measured steps
(typical.yaml); a typical machine is as priced, x = 0. A measured step of time t tells of its own:

    log(t / t0) = J . x + share * model + row

with t0 the forecast on a typical machine and J, the anchor's sensitivity, the derivative of the
log forecast by the log factors. ``model`` is one number for each model on a machine: how much
longer all of its parts take. ``row`` differs from step to step. Jointly they have a multivariate t
distribution with ``FREEDOM`` degrees: machines differ in how far all of this is spread. So anchors
tell of factors as under a normal distribution, and of the spread, by how far they are from what was
expected: deviations after n anchors are sqrt((FREEDOM + d) / (FREEDOM + n)) times as large, d the
sum of squares of their standardised deviations. None is larger than without anchors.

``share`` is 1 for a whole step. A step that was measured in parts (messages that compute waits for,
the rest) is an anchor for each part, with its share of ``model`` and of the variance of ``row``, so
that the parts together tell what the step tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, sqrt
from operator import mul

import numpy as np

from itercast.compose.machines.factors import NAMES, Factors

DEVIATES = 1.2816  # no assumption: the 90 % quantile of a normal distribution
FREEDOM = 4  # no assumption: of the distribution that spreads are fitted with


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How machines differ: standard deviations of log factors, in the order of ``NAMES``.

    ``model``: standard deviation between models on one machine; ``row``: between steps of a model.
    ``deviates``: half width of a step's 80 % interval in standard deviations of its log time.
    """

    spread: tuple[float, ...]
    model: float
    row: float
    deviates: float = DEVIATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A measured step, or a part of one, beside its forecast on the typical machine.

    ``log_ratio``: log(measured / forecast); ``sensitivity``: J, in the order of ``NAMES``. For a
    part of a step both are what the part adds to the step's; ``share``: how much of the step it is.
    """

    model: str
    sensitivity: tuple[float, ...]
    log_ratio: float
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A normal distribution of log factors and of the models measured on the machine, jointly.

    ``mean`` and ``covariance``: first of log factors in the order of ``NAMES``, then of ``models``.
    ``measured``: runs that were measured (``itercast.compose.measured_step.Measured.run``).
    ``seen``: how many anchors it was told, and the sum of squares of their standardised deviations.
    """

    typical: Spread
    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    models: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    seen: tuple[int, float] = (0, 0.0)

    @classmethod
    def new(cls, typical: Spread) -> Machine:
        """A machine of which nothing is known."""
        covariance = np.diag(np.square(typical.spread))
        return cls(typical=typical, mean=(0.0,) * len(NAMES), covariance=_rows(covariance))

    def factors(self, model: str = "") -> Factors:
        """The expected factors; a model in ``models`` adds its own deviation on this machine."""
        logs = np.array(self.mean[: len(NAMES)])
        if model in self.models:
            logs = logs + self.mean[len(NAMES) + self.models.index(model)]
        return Factors.of_logs(logs.tolist())

    def log_deviation(self, sensitivity: Sequence[float], model: str) -> float:
        """Standard deviation of the log time of a step of ``model``; ``sensitivity``: J."""
        machine, usual = self._with(model), self.typical
        direction = machine._direction(sensitivity, model)
        variance = float(direction @ np.array(machine.covariance) @ direction) + usual.row**2
        untold = hypot(*map(mul, sensitivity, usual.spread), usual.model, usual.row)
        return min(untold, sqrt(variance) * widening(*self.seen))

    def half_width(
        self, sensitivity: Sequence[float], model: str = "", other: float = 0.0
    ) -> float:
        """Half width of the 80 % interval of a step, in log time.

        ``other``: standard deviation of its log time from causes that are not the machine's.
        """
        return self.typical.deviates * hypot(self.log_deviation(sensitivity, model), other)

    def updated(self, anchors: Sequence[Anchor]) -> Machine:
        """What is known of the machine after these measured steps: the posterior."""
        machine = self
        for anchor in anchors:
            machine = machine._with(anchor.model)._updated_by(anchor)
        return machine

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
        """Derivative of a step's log time by each entry of ``mean``: J, then by models.

        That by its own model is ``share``, by others 0.
        """
        of_models = [share * (name == model) for name in self.models]
        return np.array([*sensitivity, *of_models])

    def _updated_by(self, anchor: Anchor) -> Machine:
        """Update by one anchor (a Kalman filter's step)."""
        direction = self._direction(anchor.sensitivity, anchor.model, anchor.share)
        mean, covariance = np.array(self.mean), np.array(self.covariance)
        variance = direction @ covariance @ direction + anchor.share * self.typical.row**2
        gain, off = covariance @ direction / variance, float(anchor.log_ratio - direction @ mean)
        narrowed = _rows(covariance - np.outer(gain, direction @ covariance))
        seen = (self.seen[0] + 1, self.seen[1] + off**2 / float(variance))
        mean = mean + gain * off
        return replace(self, mean=tuple(mean.tolist()), covariance=narrowed, seen=seen)

    def interval(self, name: str) -> tuple[float, float, float]:
        """A factor over that of a typical machine: expected, and bounds of its 80 % interval."""
        index = NAMES.index(name)
        told = sqrt(max(0.0, self.covariance[index][index])) * widening(*self.seen)
        half_width = self.typical.deviates * min(self.typical.spread[index], told)
        log = self.mean[index]
        return exp(log), exp(log - half_width), exp(log + half_width)


def widening(anchors: int, squares: float) -> float:
    """By how much deviations are larger than those of a normal distribution (``Machine.seen``)."""
    return sqrt((FREEDOM + squares) / (FREEDOM + anchors))


def _rows(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """A matrix as nested tuples, which can be compared and hashed."""
    return tuple(map(tuple, matrix.tolist()))
