"""Imports published tables by their mapping: a YAML file that says what their columns mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.extras.imports.base import MAX_SIZE, Imported, RowCollector, positive, refuse
from itercast.extras.published.mapped.conversions import Cells, Place
from itercast.extras.published.mapped.source import CLOSED, Rule, Skip, Source, Table, load
from itercast.extras.published.mapped.tables import columns_in, read_table, titles_in
from itercast.microbench.ops import families
from itercast.microbench.ops.family import parameter_types
from itercast.microbench.store import Row

TABLES = (".csv", ".csv.gz", ".parquet")
TEXT = "problem_source"  # column whose text has several lines
ITERATION_SIZES = ("batch", "seq", "world_size", "ranks_per_node", "rows", "cols")


def importer(mapping: Path) -> Callable[[Path], Imported]:
    """An importer of the tables that the YAML file ``mapping`` describes, read when it is run."""
    return lambda path: read(load(mapping), path)


def read(source: Source, path: Path) -> Imported:
    """Read a folder, or one file, of a source that a mapping describes."""
    patterns = [pattern for table in source.tables for pattern in table.files]
    files = sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else [path]
    by_file = [(file, _tables(source, file)) for file in files]
    order = {id(table): at for at, table in enumerate(source.tables)}
    by_file.sort(key=lambda found: order[id(found[1][0])] if found[1] else len(order))
    if not any(found for _, found in by_file):
        raise refuse(path, f"a folder of {source.about.source}", ", ".join(patterns))
    collector = RowCollector(source.about, path)
    for file, tables in by_file:
        if not tables and file.name.endswith(TABLES):
            collector.drop(f"file not imported: {collector.name(file)[-60:]!r}")
        for table in tables:
            if table.leave_out:
                collector.drop(f"file not imported: {table.leave_out}")
            elif (frame := read_table(collector, file, table)) is not None:
                _collect(collector, file, frame, table)
    return collector.done()


def _tables(source: Source, file: Path) -> list[Table]:
    """The first table of the source that a file belongs to; all sections of it for a sheet.

    A file is known by its name, or else by what it holds: all columns that a table needs.
    """
    found = [t for t in source.tables if any(file.match(pattern) for pattern in t.files)]
    if not found and file.name.endswith(TABLES):
        names, place = columns_in(file), file.absolute().as_posix()
        found = [t for t in source.tables if t.rules and not (t.header or t.section)]
        found = [t for t in found if names.issuperset(t.needed()) and re.search(t.path, place)]
    if found and found[0].section:
        return [t for t in found if t.section in titles_in(file)] or found[:1]
    return found[:1]


def _collect(collector: RowCollector, path: Path, frame: pd.DataFrame, table: Table) -> None:
    """Add the rows that each rule makes of the table, and count lines that no rule is for."""
    frame = _unskipped(collector, Cells(frame), table.skip)
    cells, names = Cells(frame), list(dict.fromkeys(n for rule in table.rules for n in rule.where))
    mine = np.ones((len(table.rules), len(frame)), dtype=bool)
    for name in names:
        found = cells.texts(name)
        for at, rule in enumerate(table.rules):
            if name in rule.where:
                mine[at] &= found.isin(rule.where[name]).to_numpy()
        facts = [
            f"{n}=" + cells.texts(n).map(lambda text: text[:40]) for n in {names[0]: 0, name: 0}
        ]
        reason = facts[0] if len(facts) == 1 else facts[0] + ", " + facts[1]
        cells.refuse(~mine.any(axis=0), "no rule for " + reason)
    _counted(collector, cells, frame)
    for at, rule in enumerate(table.rules):
        if mine[at].any():
            _add(collector, path, frame[mine[at]], rule)


def _add(collector: RowCollector, path: Path, frame: pd.DataFrame, rule: Rule) -> None:
    """Collect the rows of a rule; lines that it skips or cannot translate are counted."""
    frame = _unskipped(collector, Cells(frame), rule.skip)
    cells = Cells(frame, Place(folder=path.parent, root=collector.root))
    columns = {name: cells.value(expression) for name, expression in rule.columns.items()}
    columns = {name: _kept(name, values) for name, values in columns.items()}
    rows = pd.DataFrame({**_defaults(rule), **rule.constants, **columns}, index=frame.index)
    sizes = _sizes(cells, rule, rows)
    rows["run_id"] = collector.run_id(path)
    rows["origin"] = f"{collector.name(path)}:" + frame["line"].astype(str)
    rows = _counted(collector, cells, rows)
    if rule.fastest:
        rows = _fastest(collector, rows, rule)
    if len(rows):
        collector.add(rule.family, rows, sizes)


def _kept(name: str, values: Any) -> Any:
    """Values of a column; text that comes from the file becomes one printable line."""
    if name in (*CLOSED, TEXT) or not isinstance(values, pd.Series) or values.dtype != object:
        return values
    return values.map(_printable)


def _printable(value: Any) -> Any:
    """A text without characters that cannot be printed; other values as they are."""
    if type(value) is not str or value.isprintable():
        return value
    return "".join(c for c in value if c.isprintable())


def _unskipped(collector: RowCollector, cells: Cells, skips: tuple[Skip, ...]) -> pd.DataFrame:
    """Lines that no ``skip`` leaves out; the others are counted."""
    for skip in skips:
        cells.refuse(_hit(cells, skip), cells.value({"text": skip.reason}))
    return _counted(collector, cells, cells.frame)


def _counted(collector: RowCollector, cells: Cells, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that no rule refuses; the refused ones are counted by reason."""
    for reason, count in cells.why[cells.why != ""].value_counts().items():
        collector.drop(str(reason), int(count))
    return rows[(cells.why == "").to_numpy()]


def _hit(cells: Cells, skip: Skip) -> Any:
    """Whether each line passes the test of ``skip``, and so is left out."""
    if skip.test in ("is", "is_not"):
        return cells.texts(skip.column).isin(skip.value) == (skip.test == "is")
    if skip.test == "differs":
        return cells.texts(skip.column) != cells.texts(skip.value)
    if skip.test == "unlike":
        return ~cells.texts(skip.column).str.fullmatch(skip.value)
    numbers = cells.numbers(skip.column)
    return numbers > skip.value if skip.test == "above" else numbers < skip.value


def _defaults(rule: Rule) -> Row:
    """Defaults of the parameters of a rule's family; none for iterations."""
    if rule.family == "iteration":
        return {}
    params = fields(families()[rule.family].params)
    return {f.name: f.default for f in params if f.default is not MISSING}


def _sizes(cells: Cells, rule: Rule, rows: pd.DataFrame) -> list[str]:
    """Return the parameters that must be positive whole numbers, for the caller to check.

    The other numbers are checked here, and rows refused: ints whose default is 0, such as padding,
    must be whole and at least 0; floats must be finite.
    """
    if rule.family == "iteration":
        return [name for name in ITERATION_SIZES if name in rows]
    sizes, params = [], families()[rule.family].params
    types = parameter_types(params)
    for f in fields(params):
        if types[f.name] is int and f.default == 0:
            numbers = pd.to_numeric(rows[f.name], errors="coerce").to_numpy(dtype=float)
            good = (numbers >= 0) & (numbers <= MAX_SIZE) & (np.floor(numbers) == numbers)
            cells.refuse(~good, f"{f.name} is not a whole number")
            rows[f.name] = np.where(good, numbers, 0).astype(np.int64)
        elif types[f.name] is int:
            sizes.append(f.name)
        elif types[f.name] is float:
            rows[f.name] = pd.to_numeric(rows[f.name], errors="coerce").to_numpy(dtype=float)
            cells.refuse(~np.isfinite(rows[f.name].to_numpy()), f"{f.name} is not a number")
    return sizes


def _fastest(collector: RowCollector, rows: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Of rows with equal parameters the fastest; the others are counted."""
    params = [f.name for f in fields(families()[rule.family].params)]
    time_us = pd.Series(positive(rows["time_us"]), index=rows.index)
    ordered = rows.assign(time_us=time_us)[time_us > 0].sort_values("time_us", kind="stable")
    best = ordered.drop_duplicates([*params, "gpu", "stack"]).index
    kept = rows[rows.index.isin(best) | (time_us <= 0)]
    collector.drop("a slower one of several tunings of the same op", len(rows) - len(kept))
    return kept
