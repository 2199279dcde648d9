"""Fits how machines differ to measured steps of many: an empirical Bayes estimate.

Of a machine's n steps y = log(measured / forecast), and J, the derivative of the log forecast by
the log factors (``itercast.compose.machines.state``), a multivariate t distribution is taken with

    mean 0    scale J diag(spread ** 2) J' + model ** 2 [same model] + row ** 2 [same step]

and ``FREEDOM`` degrees, so that machines unlike all others do not decide. Spread, model and row
maximise the likelihood with weak priors. A source counts as at most ``MACHINES`` machines, however
many it measured. Steps of one machine differ by more than this typical machine's: two numbers,
found on sources left out, make intervals cover what they should (``calibrated``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from itercast.compose.anchors import ABSURD
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import DEVIATES, Spread

SPREAD, LOG_SPREAD = (
    0.3,
    0.35,
)  # prior of spreads: log(0.3) +- 0.35, best of six on sources left out
FREEDOM, MACHINES = 4, 3
COVERED = 0.8  # of measured steps that an interval is to cover
SHORT = 0.04  # by which they may fall short after anchors
WIDER = (1.0, 1.5, 2.0, 2.5, 3.0)  # times the fitted spread of models and steps on a machine
SENSITIVITY = [f"d_{name}" for name in NAMES]  # columns of measured steps
FACTORS = len(NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The steps of one machine: log ratios, sensitivities, which are of one model; its weight."""

    source: str
    y: np.ndarray
    j: np.ndarray
    same: np.ndarray
    weight: float

    def covariance(self, spread: np.ndarray, model: float, row: float) -> np.ndarray:
        """Of the log ratios of steps, as ``Machine`` has it."""
        own = (self.j * spread**2) @ self.j.T + model**2 * self.same
        covariance: np.ndarray = own + row**2 * np.eye(len(self.y))
        return covariance

    def loss(self, spread: np.ndarray, model: float, row: float) -> float:
        """Twice the negative log likelihood, but for constants."""
        root = np.linalg.cholesky(self.covariance(spread, model, row))
        z = np.linalg.solve(root, self.y)
        far = (FREEDOM + len(z)) * np.log1p(z @ z / FREEDOM)
        return float(self.weight * (far + 2 * np.log(np.diag(root)).sum()))


def groups_of(steps: pd.DataFrame) -> list[Group]:
    """The steps by machine; columns source, machine, model, log_ratio and ``SENSITIVITY``."""
    counted = steps.groupby("source")["machine"].nunique()
    machines, found = {str(source): int(n) for source, n in counted.items()}, []
    for (source, _), mine in steps.groupby(["source", "machine"]):
        code = pd.factorize(mine["model"])[0]
        found.append(
            Group(
                source=str(source),
                y=mine["log_ratio"].to_numpy(dtype=float),
                j=mine[SENSITIVITY].to_numpy(dtype=float),
                same=(code[:, None] == code[None, :]).astype(float),
                weight=min(1.0, MACHINES / machines[str(source)]),
            )
        )
    return found


def fit(steps: pd.DataFrame) -> Spread:
    """How machines differ, by measured steps; a typical machine is as it is priced."""
    start = np.r_[np.full(FACTORS, np.log(SPREAD)), np.log([0.1, 0.06])]
    found = minimize(_loss, start, args=(groups_of(steps),), method="L-BFGS-B").x
    *spread, model, row = np.exp(found).tolist()
    return Spread(spread=tuple(spread), model=model, row=row)


def _loss(found: np.ndarray, groups: Sequence[Group]) -> float:
    *spread, model, row = np.exp(found).tolist()
    prior = (((found[:FACTORS] - np.log(SPREAD)) / LOG_SPREAD) ** 2).sum()
    likely = sum(group.loss(np.array(spread), model, row) for group in groups)
    return float(prior + likely) / 2


def left_out(steps: pd.DataFrame) -> dict[str, Spread]:
    """By source the fit over all others."""
    sources = sorted(steps["source"].unique())
    return {str(s): fit(steps[steps["source"] != s]) for s in sources}


def calibrated(steps: pd.DataFrame, without: Mapping[str, Spread]) -> tuple[float, float]:
    """By what models and steps spread more than is fitted, and then everything.

    Of sources left out intervals cover ``COVERED`` without anchors, nearly as much with them.
    """
    for wider in WIDER:
        tried = {s: scaled(spread, wider, 1.0) for s, spread in without.items()}
        scale = _half_widths(steps, tried)
        known = {s: scaled(spread, wider, scale) for s, spread in without.items()}
        if min(coverage(steps, known, count) for count in (1, 3)) >= COVERED - SHORT:
            break
    return wider, scale


def scaled(spread: Spread, wider: float, scale: float) -> Spread:
    """Spreads of models and steps times ``wider``, then all of them times ``scale``."""
    own = tuple(scale * wide for wide in spread.spread)
    model, row = scale * wider * spread.model, scale * wider * spread.row
    return replace(spread, spread=own, model=model, row=row)


def _half_widths(steps: pd.DataFrame, known: Mapping[str, Spread]) -> float:
    """How many half widths either way cover ``COVERED``, without anchors."""
    found = _forecasts(steps, known, 0)
    off = (found["log_ratio"].abs() / found["half_width"]).to_numpy(dtype=float)
    share = 1 / found.groupby("source")["source"].transform("size").to_numpy(dtype=float)
    order = np.argsort(off)
    covered = np.cumsum(share[order]) / share.sum()
    return float(off[order][np.searchsorted(covered, COVERED)])


def coverage(steps: pd.DataFrame, known: Mapping[str, Spread], count: int) -> float:
    """The share of steps within their intervals after ``count`` anchors, as a mean over sources."""
    found = _forecasts(steps, known, count)
    inside = found["log_ratio"].abs() <= found["half_width"]
    return float(inside.groupby(found["source"]).mean().mean())


def _forecasts(steps: pd.DataFrame, known: Mapping[str, Spread], count: int) -> pd.DataFrame:
    parts = (with_anchors(mine, known[str(s)], count) for s, mine in steps.groupby("source"))
    return pd.concat(parts)


def with_anchors(steps: pd.DataFrame, typical: Spread, count: int) -> pd.DataFrame:
    """log(measured / forecast) and half widths of each machine's steps after ``count`` others.

    Anchors are drawn at random: each step is one once where one is drawn; three are drawn as often
    as there are steps. One that a forecast refuses as another configuration than stated is none.
    """
    draw, found, sources = np.random.default_rng(0), [], list[str]()
    for group in groups_of(steps):
        size = len(group.y)
        covariance = group.covariance(np.array(typical.spread), typical.model, typical.row)
        for at in range(size) if size > count else ():
            chosen = np.array([at]) if count < 2 else draw.choice(size, count, replace=False)
            rest = np.delete(np.arange(size), chosen) if count else chosen
            told = _posterior(group.y, covariance, chosen if count else chosen[:0], rest)
            found.append(np.column_stack(told))
            sources += [group.source] * len(rest)
    numbers = np.concatenate([np.empty((0, 2)), *found])
    return pd.DataFrame(
        {"source": sources, "log_ratio": numbers[:, 0], "half_width": DEVIATES * numbers[:, 1]}
    )


def _posterior(
    y: np.ndarray, covariance: np.ndarray, anchors: np.ndarray, rest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What is left of the log ratios of ``rest`` after ``anchors``, and their deviations."""
    variance = np.diag(covariance)
    anchors = anchors[np.abs(y[anchors]) <= ABSURD * np.sqrt(variance[anchors])]
    shared = covariance[np.ix_(rest, anchors)]
    gain = np.linalg.solve(covariance[np.ix_(anchors, anchors)], shared.T).T
    left = variance[rest] - (gain * shared).sum(axis=1)
    return y[rest] - gain @ y[anchors], np.sqrt(left)
