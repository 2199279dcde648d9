"""Fits how machines differ to measured steps of many: an empirical Bayes estimate.

Of a machine's n steps y = log(measured / forecast), and J, the derivative of the log forecast by
the log factors (``itercast.compose.machines.state``), a multivariate t distribution is taken with

    mean J m    scale J diag(spread ** 2) J' + model ** 2 [same model] + row ** 2 [same step]

and ``FREEDOM`` degrees, so that machines unlike all others do not decide. Spread, model and row,
and the means m where they are asked for, maximise the likelihood with weak priors. A source counts
as at most ``MACHINES`` machines, however many it measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import Anchor, Machine, Spread

MEAN, SPREAD, LOG_SPREAD = 0.3, 0.2, 0.7  # priors: means 0 +- 0.3, log spreads log(0.2) +- 0.7
FREEDOM, MACHINES = 4, 3
COVERED = 0.8  # of measured steps that an interval is to cover
TRIED = np.arange(0.5, 6.0, 0.01)  # deviates that an interval is wide
SENSITIVITY = [f"d_{name}" for name in NAMES]  # columns of measured steps
FACTORS = len(NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The steps of one machine: log ratios, sensitivities, which are of one model; its weight."""

    y: np.ndarray
    j: np.ndarray
    same: np.ndarray
    weight: float

    def loss(self, mean: np.ndarray, spread: np.ndarray, model: float, row: float) -> float:
        """Twice the negative log likelihood, but for constants."""
        own = (self.j * spread**2) @ self.j.T + model**2 * self.same
        root = np.linalg.cholesky(own + row**2 * np.eye(len(self.y)))
        z = np.linalg.solve(root, self.y - self.j @ mean)
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
                y=mine["log_ratio"].to_numpy(dtype=float),
                j=mine[SENSITIVITY].to_numpy(dtype=float),
                same=(code[:, None] == code[None, :]).astype(float),
                weight=min(1.0, MACHINES / machines[str(source)]),
            )
        )
    return found


def fit(steps: pd.DataFrame, *, means: bool) -> Spread:
    """How machines differ, by measured steps; without ``means`` the typical one is as priced."""
    groups, free = groups_of(steps), FACTORS if means else 0
    start = np.r_[np.zeros(free), np.full(FACTORS, np.log(SPREAD)), np.log([0.1, 0.06])]
    found = minimize(_loss, start, args=(groups, free), method="L-BFGS-B").x
    mean, spread, model, row = _parts(found, free)
    return Spread(mean=tuple(mean.tolist()), spread=tuple(spread.tolist()), model=model, row=row)


def _parts(found: np.ndarray, free: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    mean = found[:free] if free else np.zeros(FACTORS)
    spread, (model, row) = np.exp(found[free : free + FACTORS]), np.exp(found[free + FACTORS :])
    return mean, spread, float(model), float(row)


def _loss(found: np.ndarray, groups: Sequence[Group], free: int) -> float:
    mean, spread, model, row = _parts(found, free)
    prior = (mean**2).sum() / MEAN**2 + ((np.log(spread / SPREAD) / LOG_SPREAD) ** 2).sum()
    return float(prior + sum(group.loss(mean, spread, model, row) for group in groups)) / 2


def anchors_of(steps: pd.DataFrame, typical: Spread) -> list[Anchor]:
    """Measured steps as anchors: beside forecasts of a typical machine, to first order."""
    found = []
    for _, step in steps.iterrows():
        j = step[SENSITIVITY].to_numpy(dtype=float)
        ratio = float(step["log_ratio"] - j @ np.array(typical.mean))
        model = str(step["model"])
        found.append(Anchor(model=model, sensitivity=tuple(j.tolist()), log_ratio=ratio))
    return found


def forecast_by(machine: Machine, steps: pd.DataFrame) -> pd.DataFrame:
    """log(measured / forecast) of steps on a machine, and half widths of their 80 % intervals."""
    found = []
    for _, step in steps.iterrows():
        j, model = step[SENSITIVITY].to_numpy(dtype=float), str(step["model"])
        log = float(j @ np.array(machine.factors(model).logs))
        wide = machine.half_width(tuple(j), model)
        found.append((step["source"], step["log_ratio"] - log, wide))
    return pd.DataFrame(found, columns=["source", "log_ratio", "half_width"], index=steps.index)


def left_out(steps: pd.DataFrame, *, means: bool) -> dict[str, Spread]:
    """By source the fit over all others."""
    sources = sorted(steps["source"].unique())
    return {s: fit(steps[steps["source"] != s], means=means) for s in sources}


def deviates(steps: pd.DataFrame, without: dict[str, Spread]) -> float:
    """How many deviations wide intervals cover ``COVERED``: mean over sources, each left out."""
    found = pd.concat(with_anchors(mine, without[str(s)], 0) for s, mine in steps.groupby("source"))
    wide = found["log_ratio"].abs() / found["half_width"] * next(iter(without.values())).deviates
    for tried in TRIED:
        if (wide <= tried).groupby(found["source"]).mean().mean() >= COVERED:
            return float(tried)
    return float(TRIED[-1])


def with_anchors(steps: pd.DataFrame, typical: Spread, count: int) -> pd.DataFrame:
    """Forecasts of each machine's other steps after ``count`` of them, drawn at random.

    Each step is an anchor once where one is drawn; three are drawn as often as there are steps.
    """
    draw, found = np.random.default_rng(0), []
    for _, mine in steps.groupby("machine"):
        new = Machine.new(typical)
        if count == 0:
            found.append(forecast_by(new, mine))
            continue
        for at in range(len(mine)) if len(mine) > count else ():
            chosen = [at] if count == 1 else draw.choice(len(mine), count, replace=False)
            some = mine.iloc[chosen]
            known = new.told(anchors_of(some, typical))
            found.append(forecast_by(known, mine.drop(some.index)))
    columns = ["source", "log_ratio", "half_width"]
    return pd.concat(found) if found else pd.DataFrame(columns=columns)


def calibrated(spread: Spread, wide: float) -> Spread:
    """The same spread with intervals of so many deviations."""
    return replace(spread, deviates=round(wide, 2))
