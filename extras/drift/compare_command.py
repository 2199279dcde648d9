"""The command ``itercast compare``: which of two bundles forecasts better, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from itercast.eval.tables import headed, print_tables
from itercast.options import Json

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.extras.drift.bundles import Comparison
    from itercast.microbench.store import Facts

RANKS = ((1, "1st"), (2, "2nd"))
HEADS = ("family", "gpu", "points", "re-\ntest", "1st", "2nd", "2nd - 1st", "better")


def compare(
    first: Annotated[Path, typer.Argument(help="bundle folder")],
    second: Annotated[Path, typer.Argument(help="bundle folder")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="dataset root with rows that neither was trained on, iterations included; "
            "repeatable; default: the points that both trainings held out"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two bundles: median errors by op family, and which is better beyond the noise."""
    from itercast.commands.shared import log_last
    from itercast.extras.drift.bundles import compare_bundles

    comparisons = compare_bundles(first, second, data or [])
    plain = [asdict(comparison) for comparison in comparisons]
    if as_json:
        typer.echo(json.dumps(plain))
    else:
        _print(comparisons, first, second)
    log_last(log_compared, first, second, plain)


def _print(comparisons: list[Comparison], first: Path, second: Path) -> None:
    """Print the table, and for each bundle the families in which it is better."""
    print_tables(_table(comparisons))
    for number, folder in ((1, first), (2, second)):
        ahead = [comparison.family for comparison in comparisons if comparison.better == number]
        typer.echo(
            f"{folder} is better in {len(ahead)} of {len(comparisons)}: {', '.join(ahead) or '-'}"
        )


def _table(comparisons: list[Comparison]) -> Table:
    """A line per family and GPU; the better error is bold, both where they are within the noise."""
    look = {"box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False}
    table = headed("median absolute error, %", *HEADS, texts=("family", "gpu"), **look)
    for row in comparisons:
        errors = [
            Text(f"{error:.1f}", "" if row.better == other else "bold")
            for error, other in zip(row.errors_pct, (2, 1), strict=True)
        ]
        retest = "-" if row.retest_pct is None else f"{row.retest_pct:.1f}"
        better, between = "too few points", "-"
        if row.difference_pct:
            better = ("no difference", "1st", "2nd")[row.better]
            between = "{:+.1f} to {:+.1f}".format(*row.difference_pct)
        table.add_row(row.family, row.gpu, str(row.points), retest, *errors, between, better)
    return table


def log_compared(first: Path, second: Path, comparisons: Sequence[Facts]) -> None:
    """Log a comparison of two bundles to experiment compared, as one run.

    ``comparisons``: each ``Comparison`` as a dict.
    """
    from itercast.eval.tracking import store

    client = store.connect()
    place = store.experiment(client, "compared", store.note("compared"))
    numbers = {
        re.sub(r"[^\w. /-]", "", f"{row['family']}/{row['gpu']}/{name}"): error
        for row in comparisons
        for (_, name), error in zip(RANKS, row["errors_pct"], strict=True)
    }
    counts = {f"{name}_better": sum(row["better"] == n for row in comparisons) for n, name in RANKS}
    tags = {"first": str(first), "second": str(second)}
    store.log_run(client, place, f"{first.name} against {second.name}", tags, numbers | counts)
