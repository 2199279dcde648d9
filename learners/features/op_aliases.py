"""Ops that were not measured in their dtype, as those of their family that were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from learners.features.table import among, broadcast, columns
from microbench.ops.family import Family

GROUPED = " in groups"


def op_names(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """The op of each row; a grouped convolution is an op of its own, which other kernels run."""
    p = columns(rows, family)
    op = broadcast(getattr(p, "op", ""), len(rows))
    if family.name != "conv":
        return op
    return np.where(p.groups.astype(float) > 1, op + GROUPED, op)


def as_measured(
    rows: pd.DataFrame, family: Family, ops: Mapping[str, Sequence[str]], missing: bool = True
) -> pd.DataFrame:
    """Rows whose op was not measured in their dtype as one that is alike and was.

    ``ops`` that were measured, by dtype; in a dtype without any the first of those alike, or, if
    not ``missing``, the op itself.
    """
    if not (family.alike and ops):
        return rows
    p = columns(rows, family)
    for dtype in pd.unique(p.dtype):
        measured = ops.get(dtype, [next(iter(family.alike))] if missing else ())
        known = [op for op in family.alike if op in measured]
        other = (p.dtype == dtype) & among(p.op, family.alike) & ~among(p.op, known)
        if known and other.any():
            made = {"op": known[0], **family.alike[known[0]]}
            now = columns(rows, family)
            rows = rows.assign(**{c: np.where(other, v, getattr(now, c)) for c, v in made.items()})
    return rows
