"""Measures how errors of ops go together: on GPUs left out of training, and out of the envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from learners.family_model import Prepared, learn_quickly
from learners.features.table import is_number
from learners.intervals import errors_on_unseen, log_error
from learners.models.training_table import group_split
from learners.models.trees import default_options

MOST = 1.5  # log errors are cut there: single rows would decide otherwise
MIDDLE = (0.04, 0.96)  # quantiles of every feature between which a row counts as inside
HELD_SHARE = 0.2  # of the shapes
MIN_ROWS = 20  # of a GPU and family


def unseen_errors(prepared: Mapping[str, Prepared], gpus: Sequence[str]) -> pd.DataFrame:
    """Log errors by family and GPU, of models that never saw the GPU; a third is left out at once.

    ``gpus``: all of them; the same are left out of every family.
    """
    parts = [
        errors_on_unseen(one, default_options(one.table), [gpus[i::3] for i in range(3)]).assign(
            family=name
        )
        for name, one in prepared.items()
    ]
    found = pd.concat(parts, ignore_index=True)
    return found.assign(error=found["error"].clip(-MOST, MOST))


def within_families(errors: pd.DataFrame) -> pd.Series:
    """By family: mean product of two rows' errors on the same GPU over the mean square."""

    return pd.Series({str(name): _within(mine) for name, mine in errors.groupby("family")})


def _within(errors: pd.DataFrame) -> float:
    """The correlation of one family's errors on a GPU."""
    groups = [g.to_numpy() for _, g in errors.groupby("gpu")["error"] if len(g) >= MIN_ROWS]
    products = [(g.sum() ** 2 - (g**2).sum()) / (len(g) - 1) for g in groups]
    return float(np.sum(products) / np.sum([(g**2).sum() for g in groups]))


def between_families(errors: pd.DataFrame) -> float:
    """Mean product of two families' mean errors on the same GPU over their root mean squares."""
    groups = errors.groupby(["gpu", "family"])["error"].agg(["mean", "size"])
    means = groups["mean"].where(groups["size"] >= MIN_ROWS).unstack()
    scale = errors.groupby("family")["error"].apply(lambda e: float((e**2).mean()) ** 0.5)
    table = (means / scale).to_numpy()
    pairs = [table[:, a] * table[:, b] for a, b in combinations(range(table.shape[1]), 2)]
    return float(np.nanmean(np.concatenate(pairs)))


def widening_outside(prepared: Prepared) -> float:
    """Width of the errors on rows outside the envelope of training over that on rows inside.

    A row is outside where any feature is outside the MIDDLE of its values; models learn from rows
    inside alone, and are judged on other shapes.
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
