"""Correlations of op errors on GPUs left out, and how errors widen outside the envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from itercast.learners.family_model import Prepared, learn_quickly
from itercast.learners.features.table import is_number
from itercast.learners.intervals import errors_on_unseen, log_error
from itercast.learners.models.training_table import group_split
from itercast.learners.models.trees import default_options

MAX_LOG_ERROR = 1.5  # larger ones are clipped, so that single rows do not decide
MIDDLE = (0.04, 0.96)  # quantiles of every feature between which a row counts as inside
HELD_SHARE = 0.2  # of the shapes
MIN_ROWS = 20  # of a GPU and family


def unseen_errors(prepared: Mapping[str, Prepared], gpus: Sequence[str]) -> pd.DataFrame:
    """Log errors on GPUs left out of training: a row per measured row, with family and GPU.

    Models are trained three times, each time without a third of ``gpus``, in all families.
    """
    parts = [
        errors_on_unseen(one, default_options(one.table), [gpus[i::3] for i in range(3)]).assign(
            family=name
        )
        for name, one in prepared.items()
    ]
    found = pd.concat(parts, ignore_index=True)
    return found.assign(error=found["error"].clip(-MAX_LOG_ERROR, MAX_LOG_ERROR))


def within_families(errors: pd.DataFrame) -> pd.Series:
    """Correlation of errors by family: mean of e_i * e_j / mean of e**2, i and j on one GPU."""
    return pd.Series({str(name): _within(mine) for name, mine in errors.groupby("family")})


def _within(errors: pd.DataFrame) -> float:
    """The correlation of errors of one family, over all pairs of rows on the same GPU."""
    groups = [g.to_numpy() for _, g in errors.groupby("gpu")["error"] if len(g) >= MIN_ROWS]
    products = [(g.sum() ** 2 - (g**2).sum()) / (len(g) - 1) for g in groups]
    return float(np.sum(products) / np.sum([(g**2).sum() for g in groups]))


def between_families(errors: pd.DataFrame) -> float:
    """Correlation of two families: mean over GPUs of mean(a) / rms(a) * mean(b) / rms(b)."""
    groups = errors.groupby(["gpu", "family"])["error"].agg(["mean", "size"])
    means = groups["mean"].where(groups["size"] >= MIN_ROWS).unstack()
    scale = errors.groupby("family")["error"].apply(lambda e: float((e**2).mean()) ** 0.5)
    table = (means / scale).to_numpy()
    pairs = [table[:, a] * table[:, b] for a, b in combinations(range(table.shape[1]), 2)]
    return float(np.nanmean(np.concatenate(pairs)))


def widening_outside(prepared: Prepared) -> float:
    """How much wider errors are outside the envelope: their 80 % width there over that inside.

    Models learn from the middle of the range of every feature (the MIDDLE quantiles). A row with
    any feature beyond it is outside. Both widths are those of shapes held out from training.
    """
    inside = np.ones(len(prepared.kind), dtype=bool)
    for values in prepared.features.values():
        if is_number(values):
            low, high = np.quantile(values, MIDDLE)
            inside &= (low == high) | ((values >= low) & (values <= high))
    known, held = group_split(prepared.table.group, HELD_SHARE, seed=0)
    model = learn_quickly(prepared, known[inside[known]], default_options(prepared.table))
    widths = [
        float(np.diff(np.quantile(log_error(model, prepared, rows), [0.1, 0.9]))[0])
        for rows in (held[~inside[held]], held[inside[held]])
    ]
    return widths[0] / widths[1]
