"""Reads the files that a mapping names: CSV with or without a header, Parquet, sheets."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pandas.api.types import is_numeric_dtype

from itercast.capture.base.yaml_text import load_yaml
from itercast.extras.imports.base import RowCollector, Unreadable, read_bytes, read_json, read_text
from itercast.extras.published.mapped.source import JSON, Table
from itercast.microbench.store import Row

MAX_HEADER = 2**16  # characters that the names of columns may take
MAX_ROWS = 10_000_000  # of a Parquet table


def read_table(collector: RowCollector, path: Path, table: Table) -> pd.DataFrame | None:
    """The lines of a file as columns of text or numbers; None (and counted) if unreadable."""
    named = re.search(table.path, path.absolute().as_posix())
    if named is None:
        collector.drop("file in an unknown folder or of an unknown name")
        return None
    needed = table.needed()
    if path.suffix == ".parquet":
        frame = read_parquet(collector, path, needed, table.optional)
    elif path.name.endswith((".json", ".json.gz")):
        frame = read_object(collector, path, needed)
    elif table.section:
        frame = read_section(collector, path, table.section, needed)
    else:
        frame = collector.csv(path, needed, table.header)
    if frame is None:
        return None
    frame = frame.assign(**{k: v or "" for k, v in named.groupdict().items()})
    frame = frame.assign(**{name: "" for name in table.optional if name not in frame})
    for column, pattern in zip(table.parts[::2], table.parts[1::2], strict=True):
        found = frame[column].astype(str).str.extract(f"^(?:{pattern})$").fillna("")
        frame = frame.assign(**{name: found[name] for name in re.compile(pattern).groupindex})
    try:
        return unpacked(frame, table, path.parent)
    except Unreadable as exc:
        collector.unreadable(str(exc))
        return None


def columns_in(path: Path) -> set[str]:
    """Names of the columns of a CSV or Parquet file; none where it is unreadable."""
    try:
        if path.suffix == ".parquet":
            return set(parquet_columns(path))
        return set(next(csv.reader(io.StringIO(read_text(path)[:MAX_HEADER])), []))
    except (csv.Error, Unreadable):
        return set()


def titles_in(path: Path) -> set[str]:
    """The first cells of a CSV file's rows, among them the titles of sections."""
    try:
        return {row[0].strip() for row in csv.reader(io.StringIO(read_text(path))) if row}
    except (csv.Error, Unreadable):
        return set()


def read_object(collector: RowCollector, path: Path, needed: Sequence[str]) -> pd.DataFrame | None:
    """A JSON file of one object, as a table of one line; None, and counted, if unreadable."""
    try:
        values = _object(read_text(path))
        if missing := [name for name in needed if name not in values]:
            raise Unreadable(f"no key {missing[0]!r}")
    except Unreadable as exc:
        collector.unreadable(str(exc))
        return None
    collector.readable += 1
    return pd.DataFrame([{**values, "line": 1}])


def unpacked(frame: pd.DataFrame, table: Table, folder: Path) -> pd.DataFrame:
    """Adds columns ``json.KEY``: the keys of JSON objects in a column or file, and named values.

    ``table.unpack`` is that column; ``table.joined`` the file in ``folder``. ``table.named`` are a
    column of names and one of values: each pair is added like a key of the object.
    """
    if table.joined:
        file, column, key = table.joined
        known = _by_name(folder / file, key)
        objects = [known.get(str(name), {}) for name in frame[column]]
    elif table.unpack:
        objects = [_object(text) for text in frame[table.unpack]]
    else:
        return frame
    if table.named:
        name, value = (frame[column] for column in table.named)
        objects = [{**o, n: v} for o, n, v in zip(objects, name, value, strict=True)]
    wanted = [name for name in table.read() if name.startswith(JSON)]
    columns = {name: [o.get(name.removeprefix(JSON)) for o in objects] for name in wanted}
    made = pd.DataFrame(columns, index=frame.index, dtype=object)
    return pd.concat([frame, made], axis=1)


def _object(text: Any) -> Row:
    """A JSON object of plain values; nothing where the text is none."""
    try:
        return _plain(json.loads(str(text)))
    except (ValueError, RecursionError):
        return {}


def _by_name(path: Path, key: str) -> dict[str, Row]:
    """Reads a JSON file that maps names to YAML texts: by name, the plain values under ``key``.

    Raises Unreadable for other files; texts that are no YAML are left out.
    """
    texts = read_json(path)
    if not isinstance(texts, dict):
        raise Unreadable("texts are not by name")
    found = {}
    for name, text in texts.items():
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            values = load_yaml(str(text))
            found[name] = _plain(values.get(key) if isinstance(values, dict) else None)
    return found


def _plain(found: Any) -> Row:
    """The plain values of an object; nothing where it is none."""
    if not isinstance(found, dict):
        return {}
    return {str(k): v for k, v in found.items() if isinstance(v, str | int | float | bool)}


def read_section(
    collector: RowCollector, path: Path, title: str, needed: Sequence[str]
) -> pd.DataFrame | None:
    """Read one titled section of a spreadsheet saved as CSV; None, and counted, if unreadable.

    It begins at the row whose first cell is ``title``: this row is the header, or the next one if
    it holds nothing else. It ends before the next row with text in its first cell. Empty rows are
    skipped; ``line`` is added as a column, counted from 1.
    """
    try:
        rows = list(csv.reader(io.StringIO(read_text(path))))
        starts = [at for at, row in enumerate(rows) if row and row[0].strip() == title]
        if not starts:
            raise Unreadable(f"no section {title!r}")
        at = starts[0] if any(map(str.strip, rows[starts[0]][1:])) else starts[0] + 1
        header = [cell.strip() for cell in rows[at]] if at < len(rows) else []
        if missing := [name for name in needed if name not in header]:
            raise Unreadable(f"no column {missing[0]!r} in section {title!r}")
    except (csv.Error, Unreadable) as exc:
        collector.unreadable(str(exc) if isinstance(exc, Unreadable) else "not a CSV table")
        return None
    collector.readable += 1
    found: dict[str, list[object]] = {name: [] for name in (*header, "line") if name}
    for line, row in enumerate(rows[at + 1 :], start=at + 2):
        if row and row[0].strip():
            break
        if any(map(str.strip, row)):
            cells = dict(zip(header, [*row, *[""] * len(header)], strict=False))
            for name in found:
                found[name].append(line if name == "line" else cells[name].strip())
    return pd.DataFrame(found, dtype=object).assign(line=np.array(found["line"], dtype=np.int64))


def read_parquet(
    collector: RowCollector, path: Path, needed: Sequence[str], optional: Sequence[str] = ()
) -> pd.DataFrame | None:
    """These columns of a Parquet file, with a column ``line``; None (and counted) if unreadable.

    Numbers are numbers, others text; columns of ``optional`` may be missing.
    """
    try:
        frame = _parsed(read_bytes(path), needed, optional)
    except Unreadable as exc:
        collector.unreadable(str(exc))
        return None
    collector.readable += 1
    return frame.assign(line=np.arange(len(frame)))


def parquet_columns(path: Path) -> list[str]:
    """Names of the columns of a Parquet file; raises Unreadable where it is none."""
    import pyarrow as pa  # lazy: most importers do without
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise Unreadable("not a Parquet table") from exc


def _parsed(data: bytes, needed: Sequence[str], optional: Sequence[str]) -> pd.DataFrame:
    """Columns of a Parquet file: numbers as numbers, others as text; raises Unreadable."""
    import pyarrow as pa  # lazy: most importers do without
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        names = file.schema_arrow.names
        missing = [name for name in needed if names.count(name) != 1]
        if missing:
            raise Unreadable(f"no column {missing[0]!r}")
        if file.metadata.num_rows > MAX_ROWS:
            raise Unreadable(f"more than {MAX_ROWS} rows")
        wanted = [name for name in (*needed, *optional) if names.count(name) == 1]
        frame: pd.DataFrame = file.read(columns=wanted).to_pandas(ignore_metadata=True)
    except Unreadable:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError) as exc:
        raise Unreadable("not a Parquet table") from exc
    numeric = [is_numeric_dtype(frame[name]) for name in wanted]
    texts = [name for name, number in zip(wanted, numeric, strict=True) if not number]
    return frame.assign(**{name: frame[name].map(str) for name in texts})
