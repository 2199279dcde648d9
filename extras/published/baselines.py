"""Simple baselines of the public benchmark: learners, alpha-beta, interpolation, rankers.

Each is fitted on the rows ``known`` of a table and forecasts the rows ``asked``, in us. Rankers
return no times, only scores: a slower row of a call has a higher one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import xgboost as xgb
from scipy.interpolate import interp1d

from itercast.learners.compare import inputs_of
from itercast.learners.family_model import Prepared
from itercast.learners.models import trees
from itercast.learners.models.compared import LEARNERS

KNOWN_ROWS = 40_000
ROUNDS = 300  # of trees that rank
CURVE = ["gpu", "op", "world_size", "ranks_per_node"]
Index = np.ndarray
Curve = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def by_learner(name: str, prepared: Prepared, known: Index, asked: Index) -> np.ndarray:
    """Times by a learner of ``itercast.learners.models.compared``, from KNOWN_ROWS at random."""
    rows = inputs_of(prepared)
    some = np.random.default_rng(0).permutation(known)[:KNOWN_ROWS]
    fitted = LEARNERS[name](rows.take(some), prepared.table.time_us[some])
    return np.asarray(fitted(rows.take(asked)))


def alpha_beta(rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """time = alpha + beta * bytes for each curve, by least squares of the relative error."""

    def fitted(size: np.ndarray, time_us: np.ndarray, at: np.ndarray) -> np.ndarray:
        a = np.c_[1 / time_us, size / time_us]
        coefficients = np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0]
        line = coefficients[0] + coefficients[1] * at
        return np.asarray(np.maximum(line, 0.5 * time_us.min()))

    return _by_curve(rows, known, asked, fitted)


def interpolation(rows: pd.DataFrame, known: Index, asked: Index) -> np.ndarray:
    """Linear interpolation of log time over log bytes along each curve; extrapolated linearly."""

    def fitted(size: np.ndarray, time_us: np.ndarray, at: np.ndarray) -> np.ndarray:
        line = pd.Series(np.log(time_us)).groupby(np.log(size)).mean()
        x, y = line.index.to_numpy(), line.to_numpy()
        if len(x) < 2:
            return np.full(len(at), np.exp(y[0]))
        return np.asarray(np.exp(interp1d(x, y, fill_value="extrapolate")(np.log(at))))

    return _by_curve(rows, known, asked, fitted)


def _by_curve(rows: pd.DataFrame, known: Index, asked: Index, fitted: Curve) -> np.ndarray:
    """Fit each curve (GPU, collective, ranks) over message size and evaluate it at asked rows.

    A curve without known rows takes the nearest known curve of the same collective.
    """
    train, test = rows.iloc[known], rows.iloc[asked].reset_index(drop=True)
    curves = {key: part for key, part in train.groupby(CURVE)}
    out = np.full(len(test), np.nan)
    for key, part in test.groupby(CURVE):
        mine = curves.get(key)
        if mine is None:
            mine = _closest(curves, key)  # type: ignore[arg-type]
        if mine is None:
            continue
        size, time_us = (mine[c].to_numpy(dtype=float) for c in ("message_bytes", "time_us"))
        at = part["message_bytes"].to_numpy(dtype=float)
        out[part.index] = fitted(size, time_us, at)
    return out


def _closest(
    curves: dict[tuple[object, ...], pd.DataFrame], key: tuple[object, ...]
) -> pd.DataFrame | None:
    """The known curve of the same op with the nearest rank count, on the same GPU if possible."""

    def distance(other: tuple[object, ...]) -> float:
        ranks = abs(np.log2(float(other[2])) - np.log2(float(key[2])))  # type: ignore[arg-type]
        return float(ranks) + 10.0 * (other[0] != key[0])

    same = [other for other in curves if other[1] == key[1]]
    return curves[min(same, key=distance)] if same else None


CURVES = {"alpha_beta": alpha_beta, "interpolation": interpolation}


def calls(prepared: Prepared) -> Index:
    """A number for each row, the same for rows of one call under different stacks."""
    rows = prepared.query.rows.assign(_shape=prepared.table.group)
    named = [n for n in ("_shape", "gpu", "dtype", "source", "run_id") if n in rows]
    return rows.groupby(named, dropna=False).ngroup().to_numpy()


def usual_winner(prepared: Prepared, known: Index, asked: Index) -> np.ndarray:
    """Scores each row by its software: minus the number of known calls where it is fastest."""
    time_us = pd.Series(prepared.table.time_us[known])
    best = time_us.groupby(calls(prepared)[known]).idxmin().to_numpy()
    stack = prepared.query.stack
    wins = pd.Series(stack[known][best]).value_counts()
    return -wins.reindex(stack[asked], fill_value=0).to_numpy(dtype=float)


def ranked(objective: str, prepared: Prepared, known: Index, asked: Index) -> Index:
    """Scores by boosted trees that learn how a call's rows rank by speed.

    XGBoost's rank:pairwise counts all pairs alike, rank:ndcg by the speed that a wrong order loses.
    """
    call, table = calls(prepared), prepared.table
    known = known[np.argsort(call[known], kind="stable")]
    speed = 1 / pd.Series(table.time_us[known])
    label = (speed / speed.groupby(call[known]).transform("max")).to_numpy()
    rows = xgb.DMatrix(table.x[known], label=label, qid=call[known])
    options = {**trees.DEFAULTS, "objective": objective, "nthread": 1, "seed": 0}
    ranker = xgb.train({**options, "ndcg_exp_gain": False}, rows, ROUNDS)
    return -np.asarray(ranker.predict(xgb.DMatrix(table.x[asked])))


ORDERS = ("rank:pairwise", "rank:ndcg")
RANKERS: dict[str, Callable[[Prepared, Index, Index], Index]] = {
    "usual winner": usual_winner,
    **{name: partial(ranked, name) for name in ORDERS},
}
