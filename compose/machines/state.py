"""What is known of a machine: a normal distribution of the logs of its factors.

Between machines log factors x differ by a spread, fitted over sources of measured steps
(typical.yaml); a typical machine is as priced, x = 0. A measured step of time t tells of its own:

    log(t / t0) = J . x + share * (model + doublings) + row

with t0 the forecast on a typical machine and J, the anchor's sensitivity, the derivative of the
log forecast by the log factors. ``model`` is one number for each model on a machine: how much
longer all of its parts take; ``doublings`` the sum of one number for each time that the GPUs were
doubled, from 1 on, so that steps are the less alike the further their numbers of GPUs are apart.
``row`` differs from step to step. Jointly they have a multivariate t
distribution with ``FREEDOM`` degrees: machines differ in how far all of this is spread. So anchors
tell of factors as under a normal distribution, and of the spread, by how far they are from what was
expected: deviations after n anchors are sqrt((FREEDOM + d) / (FREEDOM + n)) times as large, d the
sum of squares of their standardised deviations. None is larger than without anchors.

``share`` is 1 for a whole step. A step that was measured in parts (messages that compute waits for,
the rest) is an anchor for each part, with its share of these numbers and of the variance of
``row``, so that the parts together tell what the step tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, hypot, log2, sqrt
from operator import mul

import numpy as np

from itercast.compose.machines.factors import NAMES, Factors

DEVIATES = 1.2816  # no assumption: the 90 % quantile of a normal distribution
FREEDOM = 4  # no assumption: of the distribution that spreads are fitted with
DOUBLINGS = 20  # no assumption: up to a million GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How machines differ: standard deviations of log factors, in the order of ``NAMES``.

    ``model``: standard deviation between models on one machine; ``row``: between steps of a model;
    ``doubling``: between steps on so many GPUs and on twice as many.
    ``deviates``: half width of a step's 80 % interval in standard deviations of its log time.
    """

    spread: tuple[float, ...]
    model: float
    row: float
    doubling: float = 0.0
    deviates: float = DEVIATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A measured step, or a part of one, beside its forecast on the typical machine.

    ``gpus``: how many it ran on. ``log_ratio``: log(measured / forecast); ``sensitivity``: J, in the order of ``NAMES``. Of a
    part they are what it adds to those of the step; ``share``: how much of the step it is.
    """

    model: str
    sensitivity: tuple[float, ...]
    log_ratio: float
    gpus: int = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A normal distribution of log factors, doublings and models measured on the machine, jointly.

    ``mean`` and ``covariance``: of log factors in the order of ``NAMES``, of ``DOUBLINGS`` of the
    number of GPUs, of ``models``.
    ``measured``: runs that were measured, by ``itercast.extras.anchors.infer_machine.run_name``.
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
        spread = np.array([*typical.spread, *[typical.doubling] * DOUBLINGS])
        return cls(typical=typical, mean=(0.0,) * len(spread), covariance=_rows(np.diag(spread**2)))

    def factors(self, model: str = "", gpus: int = 1) -> Factors:
        """The expected factors, with what so many GPUs and a model in ``models`` take longer."""
        logs, others = np.split(np.array(self.mean), [len(NAMES)])
        return Factors.of_logs((logs + self._beside_factors(model, gpus) @ others).tolist())

    def log_deviation(self, sensitivity: Sequence[float], model: str, gpus: int) -> float:
        """Standard deviation of the log time of a step of ``model``; ``sensitivity``: J."""
        machine, usual = self._with(model), self.typical
        direction = np.array([*sensitivity, *machine._beside_factors(model, gpus)])
        variance = float(direction @ np.array(machine.covariance) @ direction) + usual.row**2
        by_gpus = usual.doubling * sqrt(doublings(gpus))
        untold = hypot(*map(mul, sensitivity, usual.spread), usual.model, by_gpus, usual.row)
        return min(untold, sqrt(variance) * widening(*self.seen))

    def half_width(
        self, sensitivity: Sequence[float], model: str = "", gpus: int = 1, other: float = 0.0
    ) -> float:
        """Half width of the 80 % interval of a step on so many GPUs, in log time.

        ``other``: standard deviation of its log time by what no machine tells of.
        """
        return self.typical.deviates * hypot(self.log_deviation(sensitivity, model, gpus), other)

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

    def _beside_factors(self, model: str, gpus: int) -> np.ndarray:
        """Derivative of a step's log time by ``mean`` behind its factors: 1 or 0.

        1 by the doublings that lead to so many GPUs, and by its own model.
        """
        reached = [number < doublings(gpus) for number in range(DOUBLINGS)]
        return np.array([*reached, *(name == model for name in self.models)], dtype=float)

    def _updated_by(self, anchor: Anchor) -> Machine:
        """Update by one anchor (a Kalman filter's step)."""
        beside = anchor.share * self._beside_factors(anchor.model, anchor.gpus)
        direction = np.array([*anchor.sensitivity, *beside])
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


def doublings(gpus: int) -> int:
    """How often one GPU is doubled until there are so many, at most ``DOUBLINGS``."""
    return min(DOUBLINGS, ceil(log2(gpus)))


def widening(anchors: int, squares: float) -> float:
    """By how much deviations are larger than those of a normal distribution (``Machine.seen``)."""
    return sqrt((FREEDOM + squares) / (FREEDOM + anchors))


def _rows(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """A matrix as nested tuples, which can be compared and hashed."""
    return tuple(map(tuple, matrix.tolist()))
