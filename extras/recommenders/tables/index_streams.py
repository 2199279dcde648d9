"""Index streams of embedding tables: uniform, Zipf, or read from a file of real lookups.

Files hold, per table, the row numbers of a batch's lookups and where each bag starts:

- Parquet with a row per table: ``table`` (a name), ``indices`` and ``offsets`` (lists of integers;
  ``offsets`` has an entry per bag and one more, the number of indices);
- ``.pt`` or ``.pt.gz`` as in facebookresearch/dlrm_datasets: tensors (indices, offsets, lengths),
  all tables one after the other, ``lengths`` of shape (tables, batch). Only tensors are read:
  nothing in the file is executed.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.extras.lookups.reuse import histogram, histogram_text

MAX_SKEW = 10.0
UNREADABLE = (  # what unpickling damaged bytes raises
    *(RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, AssertionError),
    struct.error,
)
ZIPF = re.compile(r"zipf:([^:\s]+)(:distinct)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """One table's lookups in a batch: row numbers (lookups,) and starts of bags (bags,)."""

    table: str
    indices: np.ndarray
    starts: np.ndarray

    def first(self, bags: int) -> Lookups:
        """The lookups of the first bags; ValueError where there are fewer."""
        if bags > len(self.starts):
            raise ValueError(
                f"indices of table {self.table!r}: {len(self.starts)} bags in the file, the batch "
                f"has {bags}"
            )
        end = len(self.indices) if bags == len(self.starts) else int(self.starts[bags])
        return Lookups(table=self.table, indices=self.indices[:end], starts=self.starts[:bags])


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStream:
    """Where a table's row numbers come from: drawn with a Zipf exponent, or ``lookups`` of a file.

    ``skew`` 0 is uniform. ``distinct``: each row is looked up once, as vertices of a sampled graph.
    """

    skew: float = 0.0
    distinct: bool = False
    lookups: Lookups | None = None

    def facts(self, rows: int, bags: int) -> dict[str, Any]:
        """What ``EmbeddingBag`` needs to know of these row numbers, for ``bags`` bags of them.

        Drawn ones have the exponent of their Zipf distribution. Read ones are counted: lookups,
        distinct rows, how often rows repeat (``reuse``), and how unlike bags are in length
        (``spread``: standard deviation over mean). ValueError for too few bags, or for row numbers
        beyond ``rows``.
        """
        if self.lookups is None:
            return {"skew": self.skew} if self.skew else {}
        part = self.lookups.first(bags)
        if not len(part.indices):
            raise ValueError(f"indices of table {part.table!r}: no lookups in {bags} bags")
        if part.indices.max() >= rows:
            found = f"row {part.indices.max()}, the table has {rows} rows"
            raise ValueError(f"indices of table {part.table!r}: {found}")
        counts = np.unique(part.indices, return_counts=True)[1]
        lengths = np.diff(np.append(part.starts, len(part.indices)))
        return {
            "lookups": len(part.indices),
            "unique": len(counts),
            "reuse": histogram_text(histogram(counts)),
            "spread": round(float(lengths.std() / lengths.mean()), 3),
        }


def parse_indices(spec: str) -> Sequence[IndexStream]:
    """Parse which rows are looked up: ``uniform``, ``zipf:EXPONENT[:distinct]``, or a file.

    The first two give one stream, for all tables; a file gives one per table, in its order.
    ValueError for any other text.
    """
    if spec == "uniform":
        return (IndexStream(),)
    if found := ZIPF.fullmatch(spec):
        return (IndexStream(skew=_skew(spec, found[1]), distinct=found[2] is not None),)
    path = Path(spec)
    if not path.is_file():
        raise ValueError(f"indices {spec!r}: allowed are uniform, zipf:EXPONENT, or a file")
    return tuple(IndexStream(lookups=one) for one in read_lookups(path))


def _skew(spec: str, text: str) -> float:
    try:
        skew = float(text)
    except ValueError:
        skew = float("nan")
    if not 0 <= skew <= MAX_SKEW:
        raise ValueError(f"indices {spec!r}: the exponent is a number from 0 to {MAX_SKEW:g}")
    return skew


def read_lookups(path: Path) -> list[Lookups]:
    """Each table's lookups of a file; ValueError says what is wrong with it."""
    name = path.name
    try:
        tables = _parquet(path) if name.endswith(".parquet") else _tensors(path)
    except ValueError as exc:
        raise ValueError(f"indices {str(path)!r}: {exc}") from None
    if not tables:
        raise ValueError(f"indices {str(path)!r}: no tables")
    return tables


def _parquet(path: Path) -> list[Lookups]:
    """Lookups of each table in a Parquet file; ValueError where it is none or lacks a column."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as exc:
        raise ValueError(f"not a Parquet file ({' '.join(str(exc).split())[:80]})") from None
    missing = {"table", "indices", "offsets"} - set(file.column_names)
    if missing:
        raise ValueError(f"no column {sorted(missing)[0]!r}; needed: table, indices, offsets")
    return [_checked(str(row["table"]), row) for row in file.to_pylist()]


def _tensors(path: Path) -> list[Lookups]:
    """Lookups of each table in a file of ``torch.save``; ValueError for other content."""
    unpickling: Any = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        with warnings.catch_warnings(action="ignore"):  # an error says what is wrong with a file
            found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (unpickling, *UNREADABLE) as exc:
        why = " ".join(str(exc).split())[:80]
        raise ValueError(f"expected a file of torch.save, three tensors ({why})") from None
    three = isinstance(found, tuple | list) and len(found) == 3
    if not three or not all(isinstance(t, torch.Tensor) for t in found):
        raise ValueError("expected three tensors: indices, offsets, lengths")
    indices, offsets, lengths = (t.numpy() for t in found)
    if lengths.ndim != 2:
        raise ValueError(f"lengths have {lengths.ndim} dimensions, allowed: 2 (tables, batch)")
    count, batch = lengths.shape
    if len(offsets) < count * batch:
        raise ValueError(f"{len(offsets)} offsets for {count} tables of {batch} bags")
    ends = np.append(offsets, len(indices))
    tables = []
    for i in range(count):
        own = ends[i * batch : (i + 1) * batch + 1]
        row = {"indices": indices[own[0] : own[-1]], "offsets": own - own[0]}
        tables.append(_checked(str(i), row))
    return tables


def _checked(table: str, row: Mapping[str, Any]) -> Lookups:
    """A table's lookups with checked values; bags without lookups are allowed."""
    indices, offsets = (_integers(table, name, row[name]) for name in ("indices", "offsets"))
    if len(indices) and indices.min() < 0:
        raise ValueError(f"table {table!r}: index {indices.min()} is negative")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(indices):
        raise ValueError(f"table {table!r}: offsets go from 0 to the number of indices")
    steps = np.diff(offsets)
    if steps.min() < 0:
        i = int(np.argmax(steps < 0))
        raise ValueError(f"table {table!r}: offsets go back from {offsets[i]} to {offsets[i + 1]}")
    return Lookups(table=table, indices=indices, starts=offsets[:-1])


def _integers(table: str, name: str, values: Any) -> np.ndarray:
    array = np.asarray([] if values is None else values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(f"table {table!r}: {name} are a list of integers, got {array.dtype}")
    return array.astype(np.int64)
