"""What the trees leave over near measured points: a kernel average of their residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from learners.features.table import Features, columns
from microbench.ops.family import Family

NEIGHBOURS = 12
WIDTHS = (0.25, 0.5, 1.0)  # octaves
NUGGETS = (0.2, 1.0)  # weight of "no correction"


def coordinates(rows: pd.DataFrame, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each row (its parameters that are no sizes, as text), and log2 of its sizes."""
    p, sizes, kind = columns(rows, family), [], np.full(len(rows), "", dtype=object)
    for f in fields(family.params):
        values = np.asarray(getattr(p, f.name))
        if f.type in ("int", "float"):
            sizes.append(np.log2(1.0 + values.astype(float)))
        else:
            kind = kind + "|" + values.astype(str).astype(object)
    return kind, np.stack(sizes, axis=1).astype(np.float32)


def told_apart(kind: np.ndarray, table: Features) -> np.ndarray:
    """Kinds told apart by GPU, software and the conditions of measurement."""
    found = table["gpu"] + "|" + table["stack"]
    for name in ("threads", "cold"):
        codes, distinct = pd.factorize(table[name])
        found = found + np.array([f"|{value}" for value in distinct], dtype=object)[codes]
    return np.asarray(found + "|" + kind)


def places(kind: np.ndarray) -> dict[str, np.ndarray]:
    """Where each kind is."""
    codes, names = pd.factorize(kind)
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))
    return dict(zip(names, np.split(order, ends), strict=False))  # a last part is empty


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Log errors ``value`` of out-of-fold forecasts at training points, by kind.

    The correction is sum(w value) / (sum(w) + nugget), w = exp(-(distance / width)^2 / 2).
    """

    kind: np.ndarray
    at: np.ndarray
    value: np.ndarray
    width: float
    nugget: float

    @cached_property
    def _places(self) -> Mapping[str, np.ndarray]:
        """Where the points of each kind are."""
        return places(self.kind)

    def correction(self, kind: np.ndarray, at: np.ndarray, leave_out: Any = None) -> np.ndarray:
        """What to add to log forecasts of points of these kinds at these coordinates.

        ``leave_out`` holds two arrays of groups, of the asked and of the known points: points of
        the same group are not used, for judging the correction itself.
        """
        from scipy.spatial import cKDTree  # lazy: 0.2 s, and many bundles have no residuals

        out = np.zeros(len(kind))
        for name, asked in places(kind).items():
            if name not in self._places:
                continue
            mine = self._places[name]
            count = min(NEIGHBOURS, len(mine))
            distance, index = cKDTree(self.at[mine]).query(at[asked], k=count)
            near = mine[index.reshape(len(asked), count)]
            weight = np.exp(-0.5 * (distance.reshape(near.shape) / self.width) ** 2)
            if leave_out is not None:
                weight = weight * (leave_out[0][asked][:, None] != leave_out[1][near])
            out[asked] = (weight * self.value[near]).sum(1) / (weight.sum(1) + self.nugget)
        return out


def choose(
    kind: np.ndarray, at: np.ndarray, value: np.ndarray, group: np.ndarray
) -> Residuals | None:
    """The width and nugget that shrink left-out residuals most; None where none shrinks them."""
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
