"""What a page is made of: a device's facts, headline numbers, sections and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from itercast.eval.results import CaseResult
from itercast.extras.pages.charts import Chart
from itercast.microbench.store import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Head and rows of text; ``wide`` columns hold words and are left-aligned.

    Without a ``caption`` it has the section's title.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: Sequence[int] = (0,)
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, paragraphs, a chart and a table; ``folded``: the table opens on demand."""

    anchor: str
    title: str
    text: Sequence[str]
    chart: Chart | None = None
    table: Table | None = None
    folded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A headline number, its unit, what to compare it with; ``off``: a warning is about it."""

    label: str
    value: str
    beside: str
    off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What is known of one device: iterations, held-out ops, scores by family."""

    name: str
    results: Sequence[CaseResult] = ()
    ops: pd.DataFrame = field(default_factory=pd.DataFrame)
    fit: Facts = field(default_factory=dict)


def number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """A number as text; a dash for none."""
    if value is None or not np.isfinite(value):
        return "-"
    return f"{value:{'+' if sign else ''}.{digits}f}"
