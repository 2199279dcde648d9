"""Combines trees with networks or a Gaussian process; cross-validation chooses the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from itercast.learners.models import trees as boosted
from itercast.learners.models.gaussian_process import (
    MAX_POINTS,
    MERGE_DISTANCE,
    GaussianProcess,
    Kernel,
    fit_process,
    initial_length_scales,
    learn_kernel,
)
from itercast.learners.models.mlp import Network, fit_network
from itercast.learners.models.training_table import Array, Table
from itercast.learners.models.trees import Options, Rounds, Trees

FOLDS = 5
SEVERAL_GPUS_FOLDS = 3  # tables of several GPUs have more rows
LARGE_FOLDS = 2
MEMBERS = 2  # networks of an ensemble
QUICK_ROUNDS = 150
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # weights of the smooth model that cross-validation tries
FINE_MERGE_DISTANCE = 0.02  # log2 units, for small tables, in which each shape counts
Smooth = Network | GaussianProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble:
    """Weighted mean of two models: log ratio = share * smooth + (1 - share) * trees.

    ``smooth`` is a Gaussian process where the rows are few and all of one GPU, otherwise networks.
    Where the family specifies the covariance of the process, it says what an unseen GPU has in
    common with the others: the process then works alone (share 1, no trees).
    """

    trees: Trees | None
    share: float = 0.0
    smooth: Smooth | None = None

    def predict(self, x: Array, roofline_us: Array) -> Array:
        """Predict times in us from encoded features."""
        log_ratio = np.zeros(len(x))
        if self.trees is not None and self.share < 1.0:
            log_ratio = self.trees.log_ratio(x)
        if self.smooth is not None:
            log_ratio += self.share * (self.smooth.predict(x) - log_ratio)
        return np.asarray(roofline_us * np.exp(log_ratio))


class EnsembleInFiles(Ensemble):
    """An ensemble that is read when it is first used."""

    def __init__(self, read: Callable[[], Ensemble]) -> None:
        object.__setattr__(self, "read", read)

    def __getattr__(self, name: str) -> Any:
        """Python calls this for a field that is not set yet: read the file and set all."""
        whole = self.__dict__["read"]()
        for field in fields(Ensemble):
            object.__setattr__(self, field.name, getattr(whole, field.name))
        return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the Gaussian process of a family is fitted.

    ``length_scales`` by column of x are where the fit starts, one per term of the kernel. Points
    nearer than ``merge_distance`` (log2 units) become one. ``shares`` are the weights that
    cross-validation tries. ``kernel`` is None until it is learned or stated.
    """

    length_scales: Mapping[int, Sequence[float]]
    merge_distance: float
    shares: Sequence[float]
    kernel: Kernel | None = None

    @property
    def stated(self) -> bool:
        """Whether the family specifies the kernel, so that none is learned."""
        return self.kernel is not None and self.kernel.along > 0

    def learn(self, table: Table) -> ProcessSettings:
        """These settings with a kernel learned from the table, unless one is stated."""
        if self.stated:
            return self
        kernel = learn_kernel(table.x, table.log_ratio, self.length_scales, self.merge_distance)
        return replace(self, kernel=kernel)


def process_settings(table: Table) -> ProcessSettings | None:
    """Settings of the table's Gaussian process; None where networks are used, or trees alone."""
    stated = table.stated_kernel
    if stated and table.origin:
        return ProcessSettings(
            length_scales={column: () for column in stated.columns},
            merge_distance=MERGE_DISTANCE,
            shares=(1.0,),
            kernel=stated.kernel,
        )
    if table.origin or len(table.x) > MAX_POINTS:
        return None
    return ProcessSettings(
        length_scales=initial_length_scales(table.x),
        merge_distance=FINE_MERGE_DISTANCE,
        shares=SHARES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFit:
    """What cross-validation found: boosting rounds, weight of the smooth model, residuals.

    ``residual`` is log(measured / predicted) of each row out of fold. ``rounds`` is None where
    there are no trees, ``process`` where there is no Gaussian process.
    """

    rounds: Rounds | None
    share: float
    residual: Array
    process: ProcessSettings | None

    @property
    def offsets(self) -> tuple[float, float]:
        """10 and 90 % quantiles of the log error."""
        low, high = np.quantile(self.residual, [0.1, 0.9])
        return float(low), float(high)


def steps_for(rows: int) -> int:
    """Optimizer steps of a network: max(min(rows, 1500), rows / 20), but 400 to 6,000."""
    return int(np.clip(max(min(rows, 1500), rows // 20), 400, 6000))


def fit_smooth(table: Table, members: int, settings: ProcessSettings | None) -> Smooth:
    """Fit a Gaussian process if there are settings for one, otherwise networks."""
    x, ratio = table.x, table.log_ratio
    if settings is not None:
        scales, merge_distance = settings.length_scales, settings.merge_distance
        return fit_process(x, ratio, scales, settings.kernel, merge_distance)
    return fit_network(x, ratio, members, steps_for(len(x)))


def folds_of(train: Table) -> list[Array]:
    """Masks of the rows that each fold of cross-validation leaves out; a shape is in one fold."""
    names = np.random.default_rng(1).permutation(np.unique(train.group))
    folds = SEVERAL_GPUS_FOLDS if train.origin else FOLDS
    folds = min(folds if len(train.x) < boosted.LARGE_ROWS else LARGE_FOLDS, len(names))
    return [np.isin(train.group, names[fold::folds]) for fold in range(folds)]


def cross_fit(train: Table, options: Options) -> CrossFit:
    """Cross-validate: fit trees and a smooth model without each fold of shapes, and predict it.

    No trees are fitted where the family specifies the covariance of its Gaussian process.
    """
    fitted: list[Trees] = []
    by_trees, by_smooth = np.zeros(len(train.x)), np.zeros(len(train.x))
    settings = process_settings(train)
    settings = settings.learn(train) if settings is not None else None
    no_trees = settings is not None and settings.stated
    for fold, held in enumerate(folds_of(train)):
        test = train.take(np.flatnonzero(held))
        train_rows = train.take(np.flatnonzero(~held)) if not held.all() else test
        if not no_trees:
            fitted.append(boosted.fit(train_rows, test, options, fold))
            by_trees[held] = fitted[-1].log_ratio(test.x)
        if train.origin or settings is not None:
            by_smooth[held] = fit_smooth(train_rows, 1, settings).predict(test.x)
    shares = settings.shares if settings is not None else SHARES if train.origin else (0.0,)
    blends = [share * by_smooth + (1 - share) * by_trees for share in shares]
    best_share = int(np.argmin([np.abs(train.log_ratio - blend).mean() for blend in blends]))
    return CrossFit(
        rounds=boosted.rounds_for_all(fitted, bool(train.origin)) if fitted else None,
        share=shares[best_share],
        process=settings,
        residual=train.log_ratio - blends[best_share],
    )


def refit(table: Table, options: Options, crossed: CrossFit) -> Ensemble:
    """Fit the final model on all rows, with the settings that cross-validation found.

    These are the number of trees, and the weight of the smooth model (``share``).
    """
    settings, rounds = _with_new_columns(crossed.process, table), crossed.rounds
    return Ensemble(
        trees=boosted.refit(table, options, rounds) if rounds and crossed.share < 1.0 else None,
        share=crossed.share,
        smooth=fit_smooth(table, MEMBERS, settings) if crossed.share else None,
    )


def _with_new_columns(settings: ProcessSettings | None, table: Table) -> ProcessSettings | None:
    """The settings, learned anew if this table varies in columns that were constant before."""
    if settings is None or table.origin:
        return settings
    scales = initial_length_scales(table.x)
    if scales.keys() <= settings.length_scales.keys():
        return settings
    return replace(settings, length_scales=scales).learn(table)


def fit_quick(table: Table, options: Options) -> Ensemble:
    """Fit without cross-validation, to estimate errors on unseen GPUs.

    A Gaussian process, or trees alone: on unseen GPUs networks neither help nor harm.
    """
    settings = process_settings(table)
    if settings is not None:
        return Ensemble(trees=None, share=1.0, smooth=fit_smooth(table, MEMBERS, settings))
    rounds = boosted.SHARED_ROUNDS + QUICK_ROUNDS
    own = dict.fromkeys(boosted.own_columns(table), rounds)
    others = (table.x[:, list(table.gpus)] > 0).any(0).sum() > len(own)
    common = rounds if others or not own else 0
    return Ensemble(trees=boosted.refit(table, options, Rounds(common=common, own=own)))
