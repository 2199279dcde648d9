"""A table of errors by op family, a narrow column per learner, for terminals of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from itercast.learners.models.compared import NAMES

HEADS = {  # in two lines, so that all columns fit; other names stand as they are
    "xgboost-physics": "xgb\nphysics",
    "tile-mlp": "tile\nmlp",
    "nearest": "near-\nest",
    "roofline": "roof-\nline",
}
WHOLE_PCT = 99.95  # from here on without decimals
BEST_RANK = 1  # of all learners whose errors differ from the smallest by no more than the noise
Scores = Mapping[str, Mapping[str, float]]  # by learner: errors in % and ``rank``


def empty_table(title: str, facts: Sequence[str], learners: Sequence[str] = NAMES) -> Table:
    """A table with columns for the family, for ``facts`` and for learners, the blend first."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("family", no_wrap=True)
    for head in (*facts, *(HEADS.get(name, name) for name in reversed(learners))):
        table.add_column(head, justify="right", no_wrap=True)
    return table


def add_line(
    table: Table,
    family: str,
    facts: Sequence[str],
    scores: Scores,
    learners: Sequence[str] = NAMES,
) -> None:
    """Add a family's facts and median errors in %; a dash for none.

    Bold are the learners that no other is better than beyond the noise: one, or several that tie.
    """
    errors = (f"[bold]{t}[/]" if ahead else t for t, ahead in cells(scores, learners))
    table.add_row(family, *facts, *errors)


def cells(scores: Scores, learners: Sequence[str] = NAMES) -> list[tuple[str, bool]]:
    """The median errors of all learners as text, the blend first, and whether none is better."""
    found = [scores.get(name, {}) for name in reversed(learners)]
    return [
        (error_text(s["median_ape_pct"]) if s else "-", s.get("rank") == BEST_RANK) for s in found
    ]


def error_text(error_pct: float) -> str:
    """An error in three digits or more: 8.8, 51.3, 313."""
    return f"{error_pct:.0f}" if error_pct >= WHOLE_PCT else f"{error_pct:.1f}"
