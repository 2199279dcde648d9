"""Fits the part of an iteration's error that its ops and its host do not explain.

Half widths of an 80 % interval, in log time, as ``itercast.compose.intervals.correlated_errors``
uses them:

    h**2 = ops**2 + host**2 + shared**2 + (assumed * assumed_frac)**2

``ops`` and ``host`` are known. ``shared`` is the smallest value that covers 80 % of the measured
iterations with assumed_frac <= FEW_ASSUMED, ``assumed`` the smallest that covers 80 % of the
others.
Coverage is a mean over sources: each counts alike, however many iterations it measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from itercast.compose.intervals.correlated_errors import ASSUMED, SHARED

NOMINAL = 0.8  # of measured iterations that an interval is to cover
FEW_ASSUMED = 0.25  # up to this assumed_frac an iteration hardly rests on assumed numbers
TRIED = np.arange(0.0, 2.0, 0.01)  # half widths in log time
ROUNDS = 4  # of fitting ``shared``, then ``assumed``


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPart:
    """Half widths in log time beside those of ops and host.

    ``shared`` is that of every iteration; ``assumed`` is multiplied by the iteration's
    ``assumed_frac``.
    """

    shared: float
    assumed: float


def half_widths(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Log errors of iterations, and the half widths that come from their ops and host alone.

    ``rows`` have source, measured, predicted, p10, p90 (us) and assumed_frac; ``kind`` of device:
    cpu or gpu. Columns returned: source, error, below, above, assumed_frac.
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
    """Whether each measured iteration of a ``half_widths`` table is within its interval."""
    common = part.shared**2 + (part.assumed * rows["assumed_frac"]) ** 2
    low, high = -np.sqrt(rows["below"] ** 2 + common), np.sqrt(rows["above"] ** 2 + common)
    return (rows["error"] >= low) & (rows["error"] <= high)


def coverage(rows: pd.DataFrame, part: CommonPart) -> float:
    """Mean over sources of the share of their iterations that are covered."""
    return float(covered(rows, part).groupby(rows["source"]).mean().mean())


def fit(rows: pd.DataFrame, assumed: float | None = None) -> CommonPart:
    """The smallest half widths that cover 80 % of the rows of a ``half_widths`` table.

    Where ``assumed`` is given, only ``shared`` is fitted.
    """
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
    """The first candidate that covers NOMINAL of the rows; the last one if none does."""
    if not len(rows):
        return candidates[0]
    enough = (part for part in candidates if coverage(rows, part) >= NOMINAL)
    return next(enough, candidates[-1])


def left_out(rows: pd.DataFrame, assumed: float | None = None) -> pd.DataFrame:
    """Coverage of each source by half widths that were fitted on all other sources.

    Columns: source, iterations, shared, assumed (as fitted), coverage_pct. The argument
    ``assumed`` is that of ``fit``.
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
