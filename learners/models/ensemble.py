"""Trees and networks blended, or a process alone: how much of each, cross-validation tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from learners.models import regressors
from learners.models.gaussian_process import (
    GRAIN,
    POINTS,
    Kernel,
    Process,
    every_feature,
    fit_process,
    learn_kernel,
)
from learners.models.mlp import Network, fit_network
from learners.models.regressors import Array, Rounds, Table, Trees

FOLDS = 5
MANY_FOLDS = 3  # of rows of several GPUs: there are more of them
LARGE_FOLDS = 2
MEMBERS = 2
QUICK_ROUNDS = 150
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FINE_GRAIN = 0.02  # where shapes are few each counts
Smooth = Network | Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """log ratio = share * smooth + (1 - share) * trees.

    ``smooth`` is a Gaussian process where all rows are one GPU's and few, else networks. A process
    whose covariance the family states stands alone, without trees: that says what a GPU never seen
    has in common with the others.
    """

    trees: Trees | None
    share: float = 0.0
    smooth: Smooth | None = None

    def predict(self, x: Array, roofline_us: Array) -> Array:
        """Time in us."""
        guess = np.zeros(len(x))
        if self.trees is not None and self.share < 1.0:
            guess = self.trees.log_ratio(x)
        if self.smooth is not None:
            guess += self.share * (self.smooth.predict(x) - guess)
        return np.asarray(roofline_us * np.exp(guess))


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """What a Gaussian process runs along: columns, lengths, how near points are one; its kernel."""

    curve: Mapping[int, Sequence[float]]
    grain: float
    shares: Sequence[float]
    kernel: Kernel | None = None

    @property
    def stated(self) -> bool:
        """Whether the family states the kernel."""
        return self.kernel is not None and self.kernel.along > 0

    def learn(self, table: Table) -> Along:
        """With the kernel of the table's rows, if none is stated."""
        if self.stated:
            return self
        kernel = learn_kernel(table.x, table.log_ratio, self.curve, self.grain)
        return replace(self, kernel=kernel)


def along(table: Table) -> Along | None:
    """None where networks stand in for the process, or trees stand alone."""
    stated = table.curves
    if stated and table.identity:
        return Along(
            curve={column: () for column in stated.columns},
            grain=GRAIN,
            shares=(1.0,),
            kernel=stated.kernel,
        )
    if table.identity or len(table.x) > POINTS:
        return None
    return Along(curve=every_feature(table.x), grain=FINE_GRAIN, shares=SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFit:
    """How many rounds suffice, the smooth share, each row's log error out of fold.

    No rounds: no trees.
    """

    rounds: Rounds | None
    share: float
    residual: Array
    path: Along | None

    @property
    def offsets(self) -> tuple[float, float]:
        """10 and 90 % quantiles of the log error."""
        low, high = np.quantile(self.residual, [0.1, 0.9])
        return float(low), float(high)


def steps_for(rows: int) -> int:
    """Optimizer steps of a network: as many as rows up to 1,500, then a step per 20 rows."""
    return int(np.clip(max(min(rows, 1500), rows // 20), 400, 6000))


def fit_smooth(table: Table, members: int, path: Along | None) -> Smooth:
    """A Gaussian process or networks."""
    x, ratio = table.x, table.log_ratio
    if path is not None:
        return fit_process(x, ratio, path.curve, path.kernel, path.grain)
    return fit_network(x, ratio, members, steps_for(len(x)))


def cross_fit(train: Table, options: dict[str, Any]) -> CrossFit:
    """A booster and a network per fold of shapes, judged on the shapes left out.

    A process whose covariance is stated needs no trees.
    """
    names = np.random.default_rng(1).permutation(np.unique(train.group))
    folds = MANY_FOLDS if train.identity else FOLDS
    folds = min(folds if len(train.x) < regressors.LARGE_ROWS else LARGE_FOLDS, len(names))
    fitted: list[Trees] = []
    trees, smooth = np.zeros(len(train.x)), np.zeros(len(train.x))
    path = along(train)
    path = path.learn(train) if path is not None else None
    alone = path is not None and path.stated
    for fold in range(folds):
        held = np.isin(train.group, names[fold::folds])
        out = train.take(np.flatnonzero(held))
        rest = train.take(np.flatnonzero(~held)) if not held.all() else out
        if not alone:
            fitted.append(regressors.fit_xgboost(rest, out, options, fold))
            trees[held] = fitted[-1].log_ratio(out.x)
        if train.identity or path is not None:
            smooth[held] = fit_smooth(rest, 1, path).predict(out.x)
    shares = path.shares if path is not None else SHARES if train.identity else (0.0,)
    guesses = [share * smooth + (1 - share) * trees for share in shares]
    best = int(np.argmin([np.abs(train.log_ratio - guess).mean() for guess in guesses]))
    return CrossFit(
        rounds=regressors.rounds_for_all(fitted, bool(train.identity)) if fitted else None,
        share=shares[best],
        path=path,
        residual=train.log_ratio - guesses[best],
    )


def refit(table: Table, options: dict[str, Any], crossed: CrossFit) -> Blend:
    """Trees and networks on all rows of the table, as cross-validation found best."""
    path, rounds = _all_features(crossed.path, table), crossed.rounds
    return Blend(
        trees=regressors.refit(table, options, rounds) if rounds and crossed.share < 1.0 else None,
        share=crossed.share,
        smooth=fit_smooth(table, MEMBERS, path) if crossed.share else None,
    )


def _all_features(path: Along | None, table: Table) -> Along | None:
    """The path; learned anew where these rows vary in features that those it knows did not."""
    if path is None or table.identity:
        return path
    curve = every_feature(table.x)
    return path if curve.keys() <= path.curve.keys() else replace(path, curve=curve).learn(table)


def fit_quick(table: Table, options: dict[str, Any]) -> Blend:
    """Without cross-validation: what prices GPUs never seen, whose error none of it would tell.

    A process, or trees alone: beside lent trees networks neither help nor harm.
    """
    path = along(table)
    if path is not None:
        return Blend(trees=None, share=1.0, smooth=fit_smooth(table, MEMBERS, path))
    own = dict.fromkeys(regressors.own_columns(table), regressors.SHARED_ROUNDS + QUICK_ROUNDS)
    others = (table.x[:, list(table.gpus)] > 0).any(0).sum() > len(own)
    common = regressors.SHARED_ROUNDS + QUICK_ROUNDS if others or not own else 0
    return Blend(trees=regressors.refit(table, options, regressors.Rounds(common=common, own=own)))
