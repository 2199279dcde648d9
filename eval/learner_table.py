"""A table of errors by op family, a narrow column per learner, for terminals of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from itercast.learners.models.compared import NAMES

HEADS = {  # in two lines, so that all columns fit; other names stand as they are
    "xgboost-physics": "xgb\nphysics",
    "xgboost-plain": "xgb\nplain",
    "tile-mlp": "tile\nmlp",
    "nearest": "near-\nest",
    "roofline": "roof-\nline",
}
WHOLE_PCT = 99.95  # from here on without decimals


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
    medians: Mapping[str, float],
    learners: Sequence[str] = NAMES,
) -> None:
    """Add a family's facts and median errors in %, the smallest in bold; a dash for none."""
    errors = (f"[bold]{t}[/]" if best else t for t, best in cells(medians, learners))
    table.add_row(family, *facts, *errors)


def cells(medians: Mapping[str, float], learners: Sequence[str] = NAMES) -> list[tuple[str, bool]]:
    """The errors of all learners as text, the blend first, and which one is the smallest."""
    best = min(medians.values(), default=None)
    errors = [medians.get(name) for name in reversed(learners)]
    return [("-" if e is None else error_text(e), e is not None and e == best) for e in errors]


def error_text(error_pct: float) -> str:
    """An error in three digits or more: 8.8, 51.3, 313."""
    return f"{error_pct:.0f}" if error_pct >= WHOLE_PCT else f"{error_pct:.1f}"
