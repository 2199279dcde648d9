"""Explains which assumed numbers a forecast rests on: their value, source and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from itercast.capture.base.assumptions import Assumption, all_assumptions
from itercast.compose.forecast import Forecast
from itercast.eval.tables import headed, output, print_tables

ROOT = Path(__file__).parents[2]
PACKAGES = ("capture", "microbench", "learners", "compose", "extras")
FALLBACK = Assumption(  # several numbers of a family's file
    module="",
    name="",
    value="",
    unit="",
    source="ops that no model has seen, priced as others by their family's file in microbench/ops",
    holds="where no model has seen the op in this dtype on such a GPU",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedPart:
    """The part of an iteration that rests on one assumption, and where its value comes from."""

    name: str
    time_us: float
    iteration_frac: float
    value: str
    unit: str
    source: str
    holds: str


def assumed_parts(found: Forecast) -> list[AssumedPart]:
    """The assumptions of a forecast, by time; their times add up to ``assumed_frac``."""
    return [_part(name, us, found.iteration_us) for name, us in found.assumed_by_us.items()]


def print_parts(found: Forecast) -> None:
    """Print the assumed numbers of a forecast, and their sources."""
    if not (parts := assumed_parts(found)):
        output().print("no assumed number decides this forecast")
        return
    print_tables(_table(parts))
    for line in _sources(parts):
        output().print(line, highlight=False)


def _table(parts: Sequence[AssumedPart]) -> Table:
    """Make a table of the assumed numbers that a forecast rests on, and the time that each decides.

    ``_sources`` are printed below it.
    """
    title = "assumed numbers that this forecast rests on, by time"
    heads = ("assumption", "ms", "% of iteration", "value")
    table = headed(title, *heads, texts=("assumption",))
    for part in parts:
        share = f"{100 * part.iteration_frac:.1f}"
        table.add_row(part.name, f"{part.time_us * 1e-3:.3f}", share, part.value)
    return table


def _sources(parts: Sequence[AssumedPart]) -> list[str]:
    """A line "NAME, NAME (UNIT): SOURCE" for each source of a forecast's assumed numbers."""
    by_source: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        by_source.setdefault((part.unit, part.source), []).append(part.name)
    return [
        f"{', '.join(names)}{f' ({unit})' if unit else ''}: {source}"
        for (unit, source), names in by_source.items()
    ]


def _part(name: str, time_us: float, iteration_us: float) -> AssumedPart:
    module, _, rest = name.partition(".")
    entry, _, key = rest.partition(".")
    stated = _stated().get((module, entry), FALLBACK)
    table = stated.value if isinstance(stated.value, Mapping) else {}
    return AssumedPart(
        name=name,
        time_us=time_us,
        iteration_frac=time_us / iteration_us,
        value=str(table.get(key, stated.value)),
        unit=stated.unit,
        source=stated.source,
        holds=stated.holds,
    )


@cache
def _stated() -> Mapping[tuple[str, str], Assumption]:
    """All assumptions by module and name."""
    stated = [one for package in PACKAGES for one in all_assumptions(ROOT / package)]
    return {(one.module, one.name): one for one in stated}
