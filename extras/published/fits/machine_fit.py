"""Fits how machines differ to measured steps of many: an empirical Bayes estimate.

Of a machine's n steps y = log(measured / forecast), and J, the derivative of the log forecast by
the log factors (``itercast.compose.machines.state``), a multivariate t distribution is taken with

    mean 0    scale J diag(spread ** 2) J' + model ** 2 [same model] + row ** 2 [same step]

and ``FREEDOM`` degrees, so that machines unlike all others do not decide. Spread, model and row
maximise the likelihood with weak priors. A source counts as at most ``MACHINES`` machines, however
many it measured. One further number, fitted on left-out sources, scales intervals so that they
cover 80 % (``calibrated``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import FREEDOM, Spread, widening
from itercast.extras.anchors.infer_machine import MAX_DEVIATIONS
from itercast.extras.published.roles import ROLES

# Prior of spreads: log(0.3) +- 0.35, best of six on sources left out.
SPREAD, LOG_SPREAD = 0.3, 0.35
MACHINES = 3
COVERED = 0.8  # of measured steps that an interval is to cover
ANCHORS = (0, 1, 3)
SENSITIVITY = [f"d_{name}" for name in NAMES]  # columns of measured steps
FACTORS = len(NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The steps of one machine: log ratios, sensitivities, which share a model; its weight."""

    source: str
    y: np.ndarray
    j: np.ndarray
    same: np.ndarray
    weight: float

    def covariance(self, spread: np.ndarray, model: float, row: float) -> np.ndarray:
        """Covariance of the log ratios of the steps, as in ``Machine``."""
        own = (self.j * spread**2) @ self.j.T + model**2 * self.same
        covariance: np.ndarray = own + row**2 * np.eye(len(self.y))
        return covariance

    def loss(self, spread: np.ndarray, model: float, row: float) -> float:
        """Twice the negative log likelihood, but for constants."""
        root = np.linalg.cholesky(self.covariance(spread, model, row))
        z = np.linalg.solve(root, self.y)
        far = (FREEDOM + len(z)) * np.log1p(z @ z / FREEDOM)
        return float(self.weight * (far + 2 * np.log(np.diag(root)).sum()))


def written_parts(folder: Path, roles: Iterable[str]) -> pd.DataFrame:
    """Steps of the sources with these roles, with derivatives, read from the existing files."""
    paths = [folder / f"{source}.parquet" for role in roles for source in ROLES[role]]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ValueError(
            f"{str(folder)!r}: no SOURCE.parquet of these roles; fits.machines writes them"
        )
    return pd.concat(map(pd.read_parquet, files)).dropna(subset="log_ratio")


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


def calibrated(steps: pd.DataFrame) -> tuple[Spread, dict[str, Spread]]:
    """How machines differ by all steps, and by source without it, with intervals that cover.

    ``deviates`` is the largest that left-out sources need, after no anchor, one or three.
    """
    without = left_out(steps)
    offs = [off for n in ANCHORS if len(off := forecasts(steps, without, n))]

    def covers(spread: Spread, source: str = "") -> Spread:
        needed = [deviates(off[off["source"] != source]) for off in offs]
        return replace(spread, deviates=max(needed))

    return covers(fit(steps)), {s: covers(one, s) for s, one in without.items()}


def deviates(off: pd.DataFrame) -> float:
    """How many standard deviations cover ``COVERED`` of these forecasts; sources count alike."""
    far = (off["log_ratio"] / off["deviation"]).abs().to_numpy(dtype=float)
    share = 1 / off.groupby("source")["source"].transform("size").to_numpy(dtype=float)
    order = np.argsort(far)
    within = (np.cumsum(share[order]) - share[order] / 2) / share.sum()
    return float(np.interp(COVERED, within, far[order]))


def forecasts(steps: pd.DataFrame, known: Mapping[str, Spread], count: int) -> pd.DataFrame:
    """``with_anchors`` of all sources."""
    parts = (with_anchors(mine, known[str(s)], count) for s, mine in steps.groupby("source"))
    return pd.concat(parts, ignore_index=True)


def with_anchors(steps: pd.DataFrame, typical: Spread, count: int) -> pd.DataFrame:
    """Each machine's steps after ``count`` anchors: log(measured / forecast) and its deviation.

    ``covered``: whether it is within the interval; ``half``: half the interval's width in log time;
    ``loss``: quantile loss of both ends (10 and 90 %). Anchors are drawn at random: of one anchor
    each step has its turn; of three as many draws are made as there are steps. Steps that a
    forecast would refuse, as measured in another configuration than stated, are no anchors.
    """
    draw, found, sources = np.random.default_rng(0), [], list[str]()
    for group in groups_of(steps):
        size = len(group.y)
        covariance = group.covariance(np.array(typical.spread), typical.model, typical.row)
        for at in range(size) if size > count else ():
            chosen = np.array([at]) if count < 2 else draw.choice(size, count, replace=False)
            rest = np.delete(np.arange(size), chosen) if count else chosen
            anchors = chosen if count else chosen[:0]
            found.append(_posterior(group.y, covariance, anchors, rest))
            sources += [group.source] * len(rest)
    log_ratio, deviation = np.concatenate([np.empty((0, 2)), *found]).T
    half = typical.deviates * deviation
    return pd.DataFrame(
        {
            "source": sources,
            "log_ratio": log_ratio,
            "deviation": deviation,
            "covered": np.abs(log_ratio) <= half,
            "half": half,
            "loss": (1 - COVERED) * half + np.maximum(0.0, np.abs(log_ratio) - half),
        }
    )


def _posterior(
    y: np.ndarray, covariance: np.ndarray, anchors: np.ndarray, rest: np.ndarray
) -> np.ndarray:
    """Remaining log ratios of the steps ``rest``, given ``anchors``, and their deviations."""
    variance = np.diag(covariance)
    anchors = anchors[np.abs(y[anchors]) <= MAX_DEVIATIONS * np.sqrt(variance[anchors])]
    shared, told = covariance[np.ix_(rest, anchors)], covariance[np.ix_(anchors, anchors)]
    gain = np.linalg.solve(told, shared.T).T
    left = variance[rest] - (gain * shared).sum(axis=1)
    wide = widening(len(anchors), float(y[anchors] @ np.linalg.solve(told, y[anchors])))
    deviation = np.sqrt(np.minimum(variance[rest], left * wide**2))
    return np.column_stack([y[rest] - gain @ y[anchors], deviation])
