"""Shared by all importers: reading untrusted files, checking rows, counting rows left out."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from itercast.capture.base.yaml_text import load_yaml
from itercast.capture.step import BACK_TO_BACK
from itercast.microbench.hardware.node import Node
from itercast.microbench.store import Row

MAX_BYTES = 2**30  # of one file, unpacked
MAX_SIZE = 2**53  # of one number: beyond it a float is no longer exact
MAX_TIME_US = 1e12  # eleven days
MAX_REASONS = 200
HUGE = 1e30  # larger numbers are invalid; products of a few such numbers stay finite
FIRST = ("family", "op", "gpu", "stack", "timer", "dtype", "status", "reason", "time_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a user states where files do not: the GPU's name, number and kind of nodes."""

    gpu: str = ""
    nodes: int = 0
    gpus_per_node: int = 0
    node: Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A source: its origin and licence, and the units and conventions of its rows."""

    source: str
    where: str
    licence: str
    conventions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Dataset rows by family, and the number of rows left out by reason."""

    about: About
    rows: Mapping[str, pd.DataFrame]
    dropped: Mapping[str, int]
    commit: str = ""  # of the git checkout, if it is one


class Unreadable(ValueError):
    """Raised where a file cannot be read; the caller counts it and reads the next."""


def refuse(root: Path, what: str, looked_for: str) -> ValueError:
    """A ValueError for a path that is not what the importer expects."""
    return ValueError(f"{str(root)!r} is not {what}; looked for {looked_for}")


def read_bytes(path: Path) -> bytes:
    """Bytes of a file, decompressed if it is gzip; raises Unreadable with a reason."""
    try:
        if not path.is_file():  # opening a pipe would block
            raise Unreadable("not a regular file")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except Unreadable:
        raise
    except EOFError as exc:
        raise Unreadable("truncated gzip") from exc
    except (zlib.error, gzip.BadGzipFile) as exc:
        raise Unreadable("broken gzip") from exc
    except OSError as exc:
        raise Unreadable(exc.strerror or type(exc).__name__) from exc
    if len(data) > MAX_BYTES:
        raise Unreadable(f"larger than {MAX_BYTES} bytes")
    return data


def read_text(path: Path) -> str:
    """Text of a UTF-8 file, with or without gzip; raises Unreadable for other content."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise Unreadable("not text") from exc
    if "\0" in text:
        raise Unreadable("not text")
    return text


def read_json(path: Path) -> Any:
    """Content of a JSON file; raises Unreadable where it is none, or nested too deep."""
    return parsed_json(read_text(path))


def parsed_json(text: str) -> Any:
    """Values of a JSON text; raises Unreadable where it is none."""
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise Unreadable("JSON nested too deep") from exc
    except ValueError as exc:
        raise Unreadable("not JSON") from exc


def read_yaml(path: Path) -> Any:
    """Content of a YAML file; raises Unreadable where it is none, or has tags that fail."""
    try:
        return load_yaml(read_text(path))
    except Unreadable:
        raise
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as exc:
        raise Unreadable("not YAML") from exc
    except RecursionError as exc:
        raise Unreadable("YAML nested too deep") from exc


class RowCollector:
    """Collects the rows of one import, and counts rows and files left out by reason."""

    def __init__(self, about: About, root: Path) -> None:
        self.about = about
        self.root = root
        self.dropped: Counter[str] = Counter()
        self.frames: dict[str, list[pd.DataFrame]] = {}
        self.readable = 0

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out; or files, where the reason says so."""
        if count:
            reason = text_of(reason)
            known = reason in self.dropped or len(self.dropped) < MAX_REASONS
            self.dropped[reason if known else "other reasons"] += count

    def name(self, path: Path) -> str:
        """A file's path relative to the imported folder, or the name of the imported file."""
        return text_of(path.name if path == self.root else path.relative_to(self.root).as_posix())

    def run_id(self, path: Path, data: str = "") -> str:
        """The column run_id: source and file; with ``data`` also a digest of the content."""
        digest = "@" + hashlib.sha256(data.encode()).hexdigest()[:8] if data else ""
        return f"{self.about.source}:{self.name(path)}{digest}"

    def csv(
        self, path: Path, needed: Sequence[str], names: Sequence[str] = ()
    ) -> pd.DataFrame | None:
        """A CSV file as text columns, with a column ``line``; None (and counted) if unreadable.

        ``names`` are those of the columns where the file has no header. A last line without a line
        end is left out: the file may be cut off within a number.
        """
        try:
            text = read_text(path)
            reader = csv.reader(io.StringIO(text))
            header = list(names) or next(reader, [])
            missing = [name for name in needed if name not in header]
            if missing:
                raise Unreadable(f"no column {missing[0]!r}")
            read = [(row, reader.line_num) for row in reader if row]
        except (csv.Error, Unreadable) as exc:
            self.unreadable(str(exc) if isinstance(exc, Unreadable) else "not a CSV table")
            return None
        self.readable += 1
        if read and not text.endswith(("\n", "\r")):
            read.pop()
            self.drop("last row without a line end: the file may be truncated")
        good = [(row, line) for row, line in read if len(row) == len(header)]
        self.drop("row with a wrong number of columns", len(read) - len(good))
        columns = zip(*(row for row, _ in good), strict=True) if good else [()] * len(header)
        frame = pd.DataFrame(dict(zip(header, columns, strict=True)), dtype=object)
        return frame.assign(line=np.array([line for _, line in good], dtype=np.int64))

    def unreadable(self, reason: str) -> None:
        """Count a file that could not be read."""
        self.drop(f"file unreadable: {reason}")

    def mapped(self, frame: pd.DataFrame, column: str, names: dict[str, str]) -> pd.DataFrame:
        """Rows whose ``column`` is in ``names``, translated by it; other rows are counted."""
        found = frame[column].map(names)
        for value, count in frame[column][found.isna()].map(str).value_counts().items():
            self.drop(f"unknown {column}: {str(value)[:40]!r}", int(count))
        return frame.assign(**{column: found})[found.notna()]

    def add(self, family: str, frame: pd.DataFrame, sizes: Sequence[str] = ()) -> None:
        """Add rows with positive times and positive, whole ``sizes``; other rows are counted."""
        time_us = positive(frame["time_us"])
        good = (time_us > 0) & (time_us < MAX_TIME_US)
        self.drop(f"time is not a positive number below {MAX_TIME_US:g} us", int((~good).sum()))
        columns: Row = {"family": family, "status": "ok", "reason": "", **frame}
        if family == "iteration" and "timing" not in frame:
            columns["timing"] = BACK_TO_BACK  # as rates are published
        columns["time_us"] = time_us
        for name in sizes:
            numbers = positive(frame[name])
            whole = (numbers >= 1) & (numbers <= MAX_SIZE) & (np.floor(numbers) == numbers)
            self.drop(f"{name} is not a positive whole number", int((good & ~whole).sum()))
            good &= whole
            columns[name] = np.where(whole, numbers, 0).astype(np.int64)
        ordered = {k: columns[k] for k in (*FIRST, *columns)}
        kept = pd.DataFrame(ordered, index=frame.index)[good]
        if len(kept):
            self.frames.setdefault(family, []).append(kept)

    def add_iterations(
        self, path: Path, frame: pd.DataFrame | None, row_of: Callable[[Mapping[str, str]], Row]
    ) -> None:
        """Add a row of family iteration for each line of a table that ``row_of`` makes one of.

        Lines that it raises ValueError for are counted by its message.
        """
        rows = []
        for line in [] if frame is None else frame.to_dict("records"):
            columns = {str(k): str(v) for k, v in line.items()}
            try:
                row = row_of(columns)
            except ValueError as exc:
                self.drop(str(exc))
                continue
            rows.append({**row, "origin": f"{self.name(path)}:{columns['line']}"})
        if rows:
            made = pd.DataFrame(rows).assign(run_id=self.run_id(path))
            self.add("iteration", made, ("batch", "world_size", "ranks_per_node"))

    def done(self) -> Imported:
        """The collected rows; ValueError if no file could be read."""
        if not self.readable:
            found = self.dropped.most_common(3)
            counts = "; ".join(f"{reason} ({count})" for reason, count in found)
            raise ValueError(f"{str(self.root)!r}: no readable file: {counts or 'none found'}")
        rows = {k: pd.concat(v, ignore_index=True) for k, v in sorted(self.frames.items())}
        return Imported(about=self.about, rows=rows, dropped=dict(sorted(self.dropped.items())))


def positive(values: Any) -> Any:
    """Values as floats; 0 where a value is not a number, is negative, or is above HUGE."""
    if isinstance(values, pd.Series):
        values = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    numbers = np.asarray(values, dtype=float)
    return np.where((numbers > 0) & (numbers < HUGE), numbers, 0.0)


def number(value: Any) -> float:
    """A value as a float; 0 where it is not a positive, finite number."""
    try:
        found = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return found if np.isfinite(found) and found > 0 else 0.0


def whole(value: Any) -> int:
    """A value as an integer; 0 where it is not a positive, whole number."""
    found = number(value)
    return int(found) if found == int(found) and found <= MAX_SIZE else 0


def text_of(value: Any) -> str:
    """Text or a number as one printable line; empty for other values."""
    if not isinstance(value, str | int | float):
        return ""
    text = str(value)[:1000]
    if text.isprintable():
        return text.strip()
    return "".join(c if c.isprintable() else " " for c in text).strip()
