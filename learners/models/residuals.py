"""Corrects forecasts near measured points by a kernel average of cross-validated residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from itercast.learners.features.table import Features, columns
from itercast.microbench.ops.family import Family

NEIGHBOURS = 12
WIDTHS = (0.25, 0.5, 1.0)  # log2 units, tried by ``choose``
NUGGETS = (0.2, 1.0)  # weight of a correction of 0, tried by ``choose``


def coordinates(rows: pd.DataFrame, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each row (its parameters that are no sizes, as text) and log2(1 + sizes)."""
    p, sizes, kind = columns(rows, family), [], np.full(len(rows), "", dtype=object)
    for f in fields(family.params):
        values = np.asarray(getattr(p, f.name))
        if f.type in ("int", "float"):
            sizes.append(np.log2(1.0 + values.astype(float)))
        else:
            kind = kind + "|" + values.astype(str).astype(object)
    return kind, np.stack(sizes, axis=1).astype(np.float32)


def kind_keys(kind: np.ndarray, table: Features) -> np.ndarray:
    """Kinds extended by GPU, software and the conditions of measurement (threads, cold cache)."""
    found = table["gpu"] + "|" + table["stack"]
    for name in ("threads", "cold"):
        codes, distinct = pd.factorize(table[name])
        found = found + np.array([f"|{value}" for value in distinct], dtype=object)[codes]
    return np.asarray(found + "|" + kind)


def rows_by_kind(kind: np.ndarray) -> dict[str, np.ndarray]:
    """Row indices of each kind."""
    codes, names = pd.factorize(kind)
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))
    return dict(zip(names, np.split(order, ends), strict=False))  # the last piece is empty


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Log errors ``value`` of out-of-fold forecasts at training points ``at`` (log2 sizes).

    correction = sum(w * value) / (sum(w) + nugget) over the nearest points of the same kind, with
    w = exp(-(distance / width)^2 / 2).
    """

    kind: np.ndarray
    at: np.ndarray
    value: np.ndarray
    width: float
    nugget: float

    @cached_property
    def _by_kind(self) -> Mapping[str, np.ndarray]:
        return rows_by_kind(self.kind)

    def correction(self, kind: np.ndarray, at: np.ndarray, leave_out: Any = None) -> np.ndarray:
        """What to add to the log forecasts of points of these kinds at these coordinates.

        ``leave_out`` holds shape groups of the queried and of the known points: points of the same
        group are then not used, to score the correction itself.
        """
        from scipy.spatial import cKDTree  # lazy: 0.2 s, and many bundles have no residuals

        out = np.zeros(len(kind))
        for name, queried in rows_by_kind(kind).items():
            if name not in self._by_kind:
                continue
            mine = self._by_kind[name]
            count = min(NEIGHBOURS, len(mine))
            distance, index = cKDTree(self.at[mine]).query(at[queried], k=count)
            near = mine[index.reshape(len(queried), count)]
            weight = np.exp(-0.5 * (distance.reshape(near.shape) / self.width) ** 2)
            if leave_out is not None:
                weight = weight * (leave_out[0][queried][:, None] != leave_out[1][near])
            out[queried] = (weight * self.value[near]).sum(1) / (weight.sum(1) + self.nugget)
        return out


def choose(
    kind: np.ndarray, at: np.ndarray, value: np.ndarray, group: np.ndarray
) -> Residuals | None:
    """Residuals with the width and nugget that reduce left-out errors most; None if none does."""
    best, least = None, float(np.abs(value).mean()) * 0.99
    sample = np.random.default_rng(0).permutation(len(kind))[:20_000]
    for width in WIDTHS:
        for nugget in NUGGETS:
            tried = Residuals(kind=kind, at=at, value=value, width=width, nugget=nugget)
            found = tried.correction(kind[sample], at[sample], (group[sample], group))
            error = float(np.abs(value[sample] - found).mean())
            if error < least:
                best, least = tried, error
    return best
