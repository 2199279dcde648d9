"""Replaces ops that were not measured in a dtype by equivalent ops that were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from itercast.capture.base.slow_imports import pd
from itercast.learners.features.table import broadcast, columns, isin
from itercast.microbench.ops.family import Family


def op_names(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """The op name of each row; grouped convolutions, which run other kernels, have their own."""
    p = columns(rows, family)
    op = getattr(p, "op", "") if family.op_name is None else family.op_name(p)
    return broadcast(op, len(rows))


def as_measured(
    rows: pd.DataFrame, family: Family, ops: Mapping[str, Sequence[str]], missing: bool = True
) -> pd.DataFrame:
    """Replace each op that was not measured in its dtype by a similar op that was.

    Similar ops are those of ``Family.op_aliases``; ``ops``: measured ops by dtype. In a dtype
    without measured ops rows get the first alias, or stay as they are if ``missing`` is false.
    """
    if not (family.op_aliases and ops):
        return rows
    p = columns(rows, family)
    for dtype in pd.unique(p.dtype):
        measured = ops.get(dtype, [next(iter(family.op_aliases))] if missing else ())
        similar = [op for op in family.op_aliases if op in measured]
        lacking = (p.dtype == dtype) & isin(p.op, family.op_aliases) & ~isin(p.op, similar)
        if similar and lacking.any():
            alias = {"op": similar[0], **family.op_aliases[similar[0]]}
            current = columns(rows, family)
            changed = {c: np.where(lacking, v, getattr(current, c)) for c, v in alias.items()}
            rows = rows.assign(**changed)
    return rows
