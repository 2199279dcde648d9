"""Four learners of one family: roofline, linear, k-nearest, XGBoost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgboost as xgb

from learners.models.kernels import Curves

Array = Any  # numpy arrays of float
DEFAULTS: dict[str, Any] = {
    "max_depth": 7,
    "eta": 0.05,
    "min_child_weight": 2.0,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "lambda": 1.0,
}
LARGE: dict[str, Any] = {"max_depth": 9, "eta": 0.08, "colsample_bytree": 0.4}
LARGE_ROWS = 50_000
MANY: dict[str, Any] = {"eta": 0.1}  # fewer, larger steps: networks smooth what these leave
ROUNDS = 800
MANY_ROUNDS = 300  # after the shared ones; with more, pricing falls below 20,000 rows a second
SHARED_ROUNDS = 150
SHARED_ROWS = 4_096  # from which on all cores forecast
OWN_ROWS = 1_000  # a GPU with as many bears trees of its own
OWN_TABLE = 10_000  # rows, from which on trees for all GPUs are too few for each
OWN_ROUNDS = 600  # alone: after rounds shared with other GPUs they come out less exact
OWN: dict[str, Any] = {"max_depth": 7, "colsample_bytree": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Encoded features, roofline in us, target in us, shape group, of the same rows.

    ``identity`` holds the columns of x that say whose row it is; none where all rows are one GPU's.
    ``gpus`` are those of them that say which GPU, one each.
    ``curves`` is the covariance the family states, if it does.
    """

    x: Array
    roofline_us: Array
    time_us: Array
    group: Array
    identity: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    curves: Curves | None = None

    def take(self, index: Array) -> Table:
        """Some of the rows."""
        return Table(
            x=self.x[index],
            roofline_us=self.roofline_us[index],
            time_us=self.time_us[index],
            group=self.group[index],
            identity=self.identity,
            gpus=self.gpus,
            curves=self.curves,
        )

    @property
    def hidden_x(self) -> Array:
        """Features that do not say whose row it is."""
        x = self.x.copy()
        x[:, list(self.identity)] = 0
        return x

    @property
    def log_ratio(self) -> Array:
        """What is learned: log of time over roofline."""
        return np.log(self.time_us) - np.log(self.roofline_us)


def group_split(
    group: Array, share: float, seed: int, op: Array | None = None
) -> tuple[Array, Array]:
    """Row indices of the larger and the smaller part; a shape is never in both.

    Of every ``op`` a shape stays in the larger part: an op never measured is no unseen shape.
    """
    names = np.random.default_rng(seed).permutation(np.unique(group))
    kept = [] if op is None else group[np.unique(op.astype(str), return_index=True)[1]]
    free = names[~np.isin(names, kept)]
    count = max(1, int(share * len(names)))
    held = np.isin(group, (free if len(free) else names)[:count])
    return np.flatnonzero(~held), np.flatnonzero(held)


def predict_roofline(train: Table, x: Array, roofline_us: Array) -> Array:
    """The roofline, scaled by the median ratio of the training rows."""
    return roofline_us * np.exp(np.median(train.log_ratio))


def predict_linear(train: Table, x: Array, roofline_us: Array) -> Array:
    """Ridge regression of log time on the (logarithmic) features."""
    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    a = np.c_[(train.x - mean) / spread, np.log(train.roofline_us), np.ones(len(train.x))]
    w = np.linalg.solve(a.T @ a + 1e-2 * np.eye(a.shape[1]), a.T @ np.log(train.time_us))
    b = np.c_[(x - mean) / spread, np.log(roofline_us), np.ones(len(x))]
    return np.exp(np.clip(b @ w, -5, 25))


def predict_nearest(train: Table, x: Array, roofline_us: Array, k: int = 3) -> Array:
    """Mean log ratio of the k nearest training rows in standardised features."""
    from scipy.spatial import cKDTree  # lazy: pricing does without

    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    known, asked = (train.x - mean) / spread, (x - mean) / spread
    ratio = train.log_ratio
    near = cKDTree(known).query(asked, k=min(k, len(known)))[1].reshape(len(asked), -1)
    return roofline_us * np.exp(ratio[near].mean(1))


def _parameters(options: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**options, "objective": "reg:squarederror", "nthread": 1, "seed": seed}


def fit_shared(table: Table, options: dict[str, Any], seed: int) -> xgb.Booster:
    """The first rounds, which do not see whose row it is."""
    data = xgb.DMatrix(table.hidden_x, label=table.log_ratio)
    return xgb.train(_parameters(options, seed), data, num_boost_round=SHARED_ROUNDS)


def _shared(table: Table, options: dict[str, Any], seed: int) -> xgb.Booster | None:
    """None where there is nothing to hide."""
    return fit_shared(table, options, seed) if table.identity else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Rounds for all rows; ``own`` answer for one GPU's rows instead, by its column of x.

    Of rows of several GPUs SHARED_ROUNDS come first that do not see which. ``common`` is None where
    every GPU has its own.
    """

    common: xgb.Booster | None
    own: Mapping[int, xgb.Booster] = field(default_factory=dict)

    def log_ratio(self, x: Array) -> Array:
        """Log of time over roofline."""
        out, rest = np.zeros(len(x)), np.ones(len(x), dtype=bool)
        for column, booster in self.own.items():
            mine = x[:, column] > 0
            if mine.any():
                out[mine] = _predict(booster, x[mine])
            rest &= ~mine
        if rest.any():
            assert self.common is not None
            out[rest] = _predict(self.common, x[rest])
        return out


def _predict(booster: xgb.Booster, x: Array) -> Array:
    """By all cores where there is enough for each: a few rows wait longer for threads than one."""
    booster.set_param({"nthread": 0 if len(x) >= SHARED_ROWS else 1})
    return booster.inplace_predict(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How many of all rows (0: none), and of each GPU's own by its column."""

    common: int
    own: Mapping[int, int] = field(default_factory=dict)


def rounds_for_all(folds: Sequence[Trees], identity: bool) -> Rounds:
    """Rounds given those that sufficed without a fold: a tenth more, up to the most."""

    def enough(boosters: Sequence[xgb.Booster], most: int) -> int:
        return min(most, round(1.1 * float(np.mean([b.num_boosted_rounds() for b in boosters]))))

    columns = {column for trees in folds for column in trees.own}
    own = {
        column: enough([trees.own[column] for trees in folds if column in trees.own], OWN_ROUNDS)
        for column in sorted(columns)
    }
    most = SHARED_ROUNDS + MANY_ROUNDS if identity else ROUNDS
    common = [trees.common for trees in folds if trees.common is not None]
    return Rounds(common=enough(common, most) if common else 0, own=own)


def own_columns(table: Table) -> list[int]:
    """Columns of the GPUs that bear trees of their own, where the table is large."""
    if len(table.x) < OWN_TABLE:
        return []
    return [column for column in table.gpus if (table.x[:, column] > 0).sum() >= OWN_ROWS]


def _of_gpu(table: Table, column: int) -> Table:
    return table.take(np.flatnonzero(table.x[:, column] > 0))


def _others(table: Table, own: Iterable[int]) -> Array:
    """Which rows are of GPUs without trees of their own."""
    return ~(table.x[:, list(own)] > 0).any(1)


def _data(table: Table) -> xgb.DMatrix:
    return xgb.DMatrix(table.x, label=table.log_ratio)


def fit_xgboost(rest: Table, held: Table, options: dict[str, Any], seed: int = 0) -> Trees:
    """Squared error on the log ratio, stopped early on ``held``."""

    def early(
        rest: Table, held: Table, changes: dict[str, Any], rounds: int, first: xgb.Booster | None
    ) -> xgb.Booster:
        return xgb.train(
            {**_parameters({**options, **changes}, seed), "eval_metric": "mae"},
            _data(rest),
            num_boost_round=rounds,
            evals=[(_data(held), "held")],
            callbacks=[xgb.callback.EarlyStopping(rounds=40, save_best=True)],
            verbose_eval=False,
            xgb_model=first,
        )

    own = {}
    for column in own_columns(rest):
        out = _of_gpu(held, column)
        if len(out.x):
            own[column] = early(_of_gpu(rest, column), out, OWN, OWN_ROUNDS, None)
    if own and not _others(rest, own).any():
        return Trees(common=None, own=own)
    shared, rounds = _shared(rest, options, seed), MANY_ROUNDS if rest.identity else ROUNDS
    return Trees(common=early(rest, held, {}, rounds, shared), own=own)


def predict_xgboost(trees: Trees, x: Array, roofline_us: Array) -> Array:
    """Time in us."""
    return roofline_us * np.exp(trees.log_ratio(x))


def refit(table: Table, options: dict[str, Any], rounds: Rounds) -> Trees:
    """Trees of all rows of the table for known numbers of rounds."""
    parameters = _parameters(options, 0)
    own = {
        column: xgb.train({**parameters, **OWN}, _data(_of_gpu(table, column)), count)
        for column, count in rounds.own.items()
    }
    if not rounds.common:
        return Trees(common=None, own=own)
    first = _shared(table, options, 0)
    more = rounds.common if first is None else rounds.common - SHARED_ROUNDS
    common = xgb.train(parameters, _data(table), num_boost_round=more, xgb_model=first)
    return Trees(common=common, own=own)


def default_options(table: Table) -> dict[str, Any]:
    """Options that did well untuned; large tables bear deeper trees on fewer columns each."""
    large = LARGE if len(table.x) >= LARGE_ROWS else {}
    return {**DEFAULTS, **large, **(MANY if table.identity else {})}


def tune(train: Table, trials: int, seed: int, journal: str, name: str) -> dict[str, Any]:
    """Best options of a resumable Optuna study; the defaults where ``trials`` is 0."""
    if trials == 0:
        return default_options(train)
    import optuna  # lazy: most fits take the defaults
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rest, held = group_split(train.group, 0.25, seed + 1)
    out = train.take(held)

    def objective(trial: Any) -> float:
        options = {
            "max_depth": trial.suggest_int("max_depth", 3, 10),
            "eta": trial.suggest_float("eta", 0.02, 0.2, log=True),
            "min_child_weight": trial.suggest_float("min_child_weight", 0.5, 20, log=True),
            "subsample": trial.suggest_float("subsample", 0.5, 1.0),
            "colsample_bytree": trial.suggest_float("colsample_bytree", 0.4, 1.0),
            "lambda": trial.suggest_float("lambda", 0.1, 20, log=True),
        }
        booster = fit_xgboost(train.take(rest), out, options, seed)
        guess = predict_xgboost(booster, out.x, out.roofline_us)
        return float(np.mean(np.abs(np.log(guess / out.time_us))))

    study = optuna.create_study(
        study_name=name,
        storage=JournalStorage(JournalFileBackend(journal)),
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed),
    )
    finished = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    study.optimize(objective, n_trials=max(0, trials - len(finished)))
    return dict(study.best_params)
