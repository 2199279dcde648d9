"""A table of errors, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from itercast.eval.results import COLUMNS


def error_table(title: str, scored: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of errors in % by name: absolute errors, bias (signed mean), retest; "-": unknown."""
    table = Table(title=f"{title}, errors in %")
    table.add_column("", overflow="fold")
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for name, scores in scored.items():
        cells = (f"{scores[key]:.1f}" if key in scores else "-" for key in COLUMNS.values())
        table.add_row(name, *cells)
    return table
