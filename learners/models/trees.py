"""Gradient-boosted trees (XGBoost) that predict log(time / roofline), common and per GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.base.slow_imports import xgb
from itercast.learners.models.training_table import Array, Table, group_split

if TYPE_CHECKING:
    import optuna

Options = dict[str, Any]  # of XGBoost, by name
DEFAULTS: Options = {
    "max_depth": 7,
    "eta": 0.05,
    "min_child_weight": 2.0,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "lambda": 1.0,
}
LARGE_ROWS = 50_000  # tables of this many rows get the options of LARGE
LARGE: Options = {"max_depth": 9, "eta": 0.08, "colsample_bytree": 0.4}
SEVERAL_GPUS: Options = {"eta": 0.1}  # fewer, larger steps: networks smooth the remainder
ROUNDS = 800  # boosting rounds of a table of one device, at most
SEVERAL_GPUS_ROUNDS = 300  # after the shared rounds; more would price under 20,000 rows a second
SHARED_ROUNDS = 150  # first rounds of a table of several GPUs, which do not see the GPU
THREADED_ROWS = 4_096  # batches of this many rows are predicted with all threads
OWN_ROWS = 1_000  # a GPU with this many rows gets trees of its own ...
OWN_TABLE = 10_000  # ... in tables of this many rows
OWN_ROUNDS = 600
OWN: Options = {"max_depth": 7, "colsample_bytree": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Boosted trees of one family: ``own`` by GPU (its column of x), ``common`` for all others.

    ``common`` starts with SHARED_ROUNDS that do not see the GPU if the table has several; it is
    None where every GPU has its own.
    """

    common: xgb.Booster | None
    own: Mapping[int, xgb.Booster] = field(default_factory=dict)

    def log_ratio(self, x: Array) -> Array:
        """Predict log(time / roofline); ValueError for a GPU for which there are no trees."""
        out, rest = np.zeros(len(x)), np.ones(len(x), dtype=bool)
        for column in self.own:
            of_gpu = x[:, column] > 0
            if of_gpu.any():
                out[of_gpu] = _predict(self.own[column], x[of_gpu])
            rest &= ~of_gpu
        if rest.any():
            if self.common is None:
                raise ValueError(
                    f"{int(rest.sum())} rows of a GPU without trees of its own, and no common trees"
                )
            out[rest] = _predict(self.common, x[rest])
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How many trees are boosted: ``common`` for all GPUs together (0: none), ``own`` for one each.

    Keys of ``own`` are the GPUs' columns of x.
    """

    common: int
    own: Mapping[int, int] = field(default_factory=dict)


def fit(train: Table, test: Table, options: Options, seed: int = 0) -> Trees:
    """Fit to ``train`` by squared error of the log ratio; stop early by the error on ``test``."""

    def early_stopped(
        train: Table, test: Table, changes: Options, rounds: int, first: xgb.Booster | None
    ) -> xgb.Booster:
        """At most ``rounds`` trees on ``train`` after those of ``first``, with options changed."""
        data = quantile_matrix(train)
        return xgb.train(
            {**_parameters({**options, **changes}, seed), "eval_metric": "mae"},
            data,
            num_boost_round=rounds,
            evals=[(quantile_matrix(test, cuts_of=data), "held")],
            callbacks=[xgb.callback.EarlyStopping(rounds=40, save_best=True)],
            verbose_eval=False,
            xgb_model=first,
        )

    own_trees = {}
    for column in own_columns(train):
        test_rows = test.of_gpu(column)
        if len(test_rows.x):
            own_trees[column] = early_stopped(
                train.of_gpu(column), test_rows, OWN, OWN_ROUNDS, None
            )
    if own_trees and (train.x[:, list(own_trees)] > 0).any(1).all():
        return Trees(common=None, own=own_trees)
    rounds = SEVERAL_GPUS_ROUNDS if train.origin else ROUNDS
    shared = _blind_to_gpu(train, options, seed)
    return Trees(common=early_stopped(train, test, {}, rounds, shared), own=own_trees)


def refit(rows: Table, options: Options, rounds: Rounds) -> Trees:
    """Fit on all rows with known numbers of rounds."""
    parameters = _parameters(options, 0)
    own = {
        column: xgb.train({**parameters, **OWN}, quantile_matrix(rows.of_gpu(column)), count)
        for column, count in rounds.own.items()
    }
    if not rounds.common:
        return Trees(common=None, own=own)
    first = _blind_to_gpu(rows, options, 0)
    more = rounds.common if first is None else rounds.common - SHARED_ROUNDS
    common = xgb.train(parameters, quantile_matrix(rows), num_boost_round=more, xgb_model=first)
    return Trees(common=common, own=own)


def rounds_for_all(folds: Sequence[Trees], several_gpus: bool) -> Rounds:
    """Rounds for a fit on all rows: 1.1 times the mean over the folds, up to the maximum."""

    def mean_rounds(boosters: Sequence[xgb.Booster], most: int) -> int:
        return min(most, round(1.1 * float(np.mean([b.num_boosted_rounds() for b in boosters]))))

    columns = {column for trees in folds for column in trees.own}
    own = {
        column: mean_rounds(
            [trees.own[column] for trees in folds if column in trees.own], OWN_ROUNDS
        )
        for column in sorted(columns)
    }
    most = SHARED_ROUNDS + SEVERAL_GPUS_ROUNDS if several_gpus else ROUNDS
    common = [trees.common for trees in folds if trees.common is not None]
    return Rounds(common=mean_rounds(common, most) if common else 0, own=own)


def own_columns(table: Table) -> list[int]:
    """Columns of the GPUs that get trees of their own; none in small tables."""
    if len(table.x) < OWN_TABLE:
        return []
    return [column for column in table.gpus if (table.x[:, column] > 0).sum() >= OWN_ROWS]


def predict_us(trees: Trees, x: Array, roofline_us: Array) -> Array:
    """Predict times in us: roofline * exp(log ratio)."""
    return roofline_us * np.exp(trees.log_ratio(x))


def default_options(table: Table) -> Options:
    """XGBoost options without tuning; large tables get deeper trees on fewer columns each."""
    large = LARGE if len(table.x) >= LARGE_ROWS else {}
    return {**DEFAULTS, **large, **(SEVERAL_GPUS if table.origin else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The options of an Optuna study's best trial, and its finished trials."""

    options: Options
    trials: Sequence[Options] = ()  # ``number``, ``value`` (mean absolute log error), ``params``


def tune(train: Table, trials: int, storage: str | None, name: str) -> Tuned:
    """Best XGBoost options of a resumable Optuna study; the defaults where ``trials`` is 0.

    Several machines that share the database ``storage`` run the trials together; without it they
    are in one of this machine.
    """
    if trials == 0:
        return Tuned(options=default_options(train))
    import optuna  # lazy: most fits take the defaults

    rest, held = group_split(train.group, 0.25, seed=1)
    test = train.take(held)

    def objective(trial: optuna.Trial) -> float:
        trees = fit(train.take(rest), test, suggested_options(trial))
        forecast_us = predict_us(trees, test.x, test.roofline_us)
        return float(np.mean(np.abs(np.log(forecast_us / test.time_us))))

    study, complete = open_study(storage, name), (optuna.trial.TrialState.COMPLETE,)
    # With the seed of the first start, or of another machine, the next trials would repeat others.
    drawn = len(study.trials) if storage is None else None
    study.sampler = optuna.samplers.TPESampler(seed=drawn, constant_liar=storage is not None)
    if len(study.get_trials(states=complete)) < trials:
        study.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(trials, complete)])
    done = study.get_trials(states=complete)
    finished = tuple({"number": t.number, "value": t.value, "params": t.params} for t in done)
    return Tuned(options=dict(study.best_params), trials=finished)


def open_study(storage: str | None, name: str) -> optuna.Study:
    """The Optuna study of this name in a database (URL), or in this machine's; begun if missing."""
    import optuna  # lazy, as above

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if storage is None:
        folder = cache_folder("optuna")
        folder.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{folder / 'trials.db'}"
    try:
        return optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
    except Exception as exc:  # of SQLAlchemy, and of each database's driver
        place = re.sub(r"//[^/]*@", "//...@", storage)  # without credentials
        reason = f"{type(exc).__name__}: {str(exc).splitlines()[0][:160] if str(exc) else ''}"
        reason = reason.replace(storage, place)
        raise ValueError(f"storage {place!r}: no database that Optuna can use ({reason})") from exc


def suggested_options(trial: optuna.Trial) -> Options:
    """The search space of ``tune``: XGBoost options drawn by one Optuna trial."""
    return {
        "max_depth": trial.suggest_int("max_depth", 3, 10),
        "eta": trial.suggest_float("eta", 0.02, 0.2, log=True),
        "min_child_weight": trial.suggest_float("min_child_weight", 0.5, 20, log=True),
        "subsample": trial.suggest_float("subsample", 0.5, 1.0),
        "colsample_bytree": trial.suggest_float("colsample_bytree", 0.4, 1.0),
        "lambda": trial.suggest_float("lambda", 0.1, 20, log=True),
    }


def _parameters(options: Options, seed: int) -> Options:
    return {**options, "objective": "reg:squarederror", "nthread": 1, "seed": seed}


def quantile_matrix(rows: Table, cuts_of: xgb.DMatrix | None = None) -> xgb.DMatrix:
    """The rows with every feature's value as the bin between two quantiles that holds it.

    ``cuts_of``: a matrix whose quantiles are taken, to score trees while they are fitted to it.
    """
    return xgb.QuantileDMatrix(rows.x, label=rows.log_ratio, ref=cuts_of, nthread=1)


def _blind_to_gpu(rows: Table, options: Options, seed: int) -> xgb.Booster | None:
    """The first SHARED_ROUNDS trees, fitted with the columns of ``origin`` set to 0, if any."""
    if not rows.origin:
        return None
    x = rows.x.copy()
    x[:, list(rows.origin)] = 0
    return xgb.train(_parameters(options, seed), quantile_matrix(replace(rows, x=x)), SHARED_ROUNDS)


def _predict(booster: xgb.Booster, x: Array) -> Array:
    """Predict with all threads if the batch is large: a few rows are faster on one."""
    booster.set_param({"nthread": 0 if len(x) >= THREADED_ROWS else 1})
    return booster.inplace_predict(x)
