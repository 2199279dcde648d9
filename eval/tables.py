"""Prints tables without cutting a number: off a terminal, up to 120 characters wide."""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from math import log
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDE = 100_000  # characters of a line in a file, a pipe or a log
TABLE = 120  # of a table there
LEAST = 14  # characters that a narrow terminal leaves a column of text


def three_digits(value: float) -> str:
    """A number with three digits, or all before the point: 0.158, 26.2, 1,540."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def one_decimal(value: float | None) -> str:
    """A number with one decimal; "-" where it is unknown."""
    return "-" if value is None else f"{value:.1f}"


def sized(nbytes: float) -> str:
    """Bytes with three digits in B, KB, MB or GB, of 1,000 each: 4 B, 8.39 MB, 24.3 GB."""
    power = min(3, int(log(max(nbytes, 1), 1000)))
    return f"{three_digits(nbytes / 1000**power)} {('B', 'KB', 'MB', 'GB')[power]}"


def headed(title: str, *heads: str, texts: Container[str], **look: Any) -> Table:
    """A table without rows, whose columns of ``texts`` may wrap; others are numbers, to the right.

    ``look``: options of rich.
    """
    table = Table(title=title, caption_justify="left", **look)
    for head in heads:
        is_text = head in texts
        table.add_column(
            head, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    return table


def output() -> Console:
    """stdout: as wide as its terminal, or as COLUMNS says; elsewhere lines are never wrapped.

    Rich's markup is off, as texts have brackets (``pip install transformers[torch]``).
    """
    wraps = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if wraps else WIDE, markup=False)


def beside_output() -> Console:
    """stderr, for what is left out: stdout has the answer alone, which may be one JSON object."""
    width = None if sys.stderr.isatty() else WIDE
    return Console(stderr=True, width=width, markup=False)


def print_tables(*tables: Table) -> None:
    """Print tables; one too wide for the output wraps its columns of text, those of numbers never.

    Right-justified columns are numbers. A terminal too narrow for that breaks the lines itself.
    """
    width = output().width if output().width != WIDE else TABLE
    for table in tables:
        if _unwrapped_width(table) > width:
            Console(width=max(width, _wrap_texts(table)), markup=False).print(table)
        else:
            output().print(table)


def _unwrapped_width(table: Table) -> int:
    """Width in characters at which nothing in a table has to wrap."""
    wide = Console(width=WIDE, markup=False)
    return Measurement.get(wide, wide.options, table).maximum


def _wrap_texts(table: Table) -> int:
    """Let a table's columns of text wrap; returns the fewest characters it can be wide."""
    texts = [column for column in table.columns if column.justify != "right"]
    for column in table.columns:
        column.no_wrap, column.overflow = column not in texts, "fold"
        if isinstance(column.header, str) and column.no_wrap:
            column.header = column.header.replace(" ", "\n")
    for column in texts:
        column.max_width = LEAST
    least = _unwrapped_width(table)
    for column in texts:
        column.max_width = None
    return least
