"""Fits what the errors of a whole iteration have in common, from measured iterations.

Of an iteration's interval the half width by its ops and its host is known; ``shared`` and
``assumed`` (``compose.intervals.correlated_errors``) are the least with which 80 % of the measured
iterations are covered: ``shared`` of those that hardly rest on assumptions, ``assumed`` of others.
Each source of measurements has one vote, however many iterations it measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from compose.intervals.correlated_errors import ASSUMED, SHARED

NOMINAL = 0.8  # of measured iterations that an interval is to cover
FEW_ASSUMED = 0.25  # share of an iteration
TRIED = np.arange(0.0, 2.0, 0.01)  # half widths in log time
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPart:
    """Half widths in log time: of every iteration, and of one that rests on assumptions alone."""

    shared: float
    assumed: float


def half_widths(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Log errors of iterations, and half widths of their intervals without the common part.

    ``rows`` have source, measured, predicted, p10, p90 (us) and assumed_frac; ``kind`` of device:
    cpu or gpu. Columns: source, error, below, above, assumed_frac.
    """
    common = SHARED[kind] ** 2 + (ASSUMED * rows["assumed_frac"]) ** 2
    below, above = np.log(rows["predicted"] / rows["p10"]), np.log(rows["p90"] / rows["predicted"])
    return pd.DataFrame(
        {
            "source": rows["source"],
            "error": np.log(rows["measured"] / rows["predicted"]),
            "below": np.sqrt((below**2 - common).clip(lower=0.0)),
            "above": np.sqrt((above**2 - common).clip(lower=0.0)),
            "assumed_frac": rows["assumed_frac"],
        }
    )


def covered(rows: pd.DataFrame, part: CommonPart) -> pd.Series:
    """Whether each measured iteration is within its interval; rows as of ``half_widths``."""
    common = part.shared**2 + (part.assumed * rows["assumed_frac"]) ** 2
    low, high = -np.sqrt(rows["below"] ** 2 + common), np.sqrt(rows["above"] ** 2 + common)
    return (rows["error"] >= low) & (rows["error"] <= high)


def coverage(rows: pd.DataFrame, part: CommonPart) -> float:
    """Mean over sources of the share of their iterations that are covered."""
    return float(covered(rows, part).groupby(rows["source"]).mean().mean())


def fit(rows: pd.DataFrame, assumed: float | None = None) -> CommonPart:
    """The least half widths that cover 80 %; with ``assumed`` stated only the shared one."""
    few = rows[rows["assumed_frac"] <= FEW_ASSUMED]
    many = rows[rows["assumed_frac"] > FEW_ASSUMED]
    found = CommonPart(shared=0.0, assumed=assumed or 0.0)
    for _ in range(ROUNDS):
        candidates = [CommonPart(shared=s, assumed=found.assumed) for s in TRIED]
        found = _least(few, candidates)
        if assumed is None:
            candidates = [CommonPart(shared=found.shared, assumed=a) for a in TRIED]
            found = _least(many, candidates)
    return found


def _least(rows: pd.DataFrame, candidates: list[CommonPart]) -> CommonPart:
    """The first candidate that covers enough of the rows; the last one if none does."""
    if not len(rows):
        return candidates[0]
    enough = (part for part in candidates if coverage(rows, part) >= NOMINAL)
    return next(enough, candidates[-1])


def left_out(rows: pd.DataFrame, assumed: float | None = None) -> pd.DataFrame:
    """By source: coverage by a common part that was fitted on all other sources, and its widths.

    ``assumed`` as for ``fit``.
    """
    lines = []
    for source in sorted(rows["source"].unique()):
        mine = rows["source"] == source
        part = fit(rows[~mine], assumed)
        lines.append(
            {
                "source": source,
                "iterations": int(mine.sum()),
                "shared": part.shared,
                "assumed": part.assumed,
                "coverage_pct": 100 * float(covered(rows[mine], part).mean()),
            }
        )
    return pd.DataFrame(lines)
