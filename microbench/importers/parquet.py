"""Reads Parquet tables that may be damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from itercast.microbench.importers.base import RowCollector, Unreadable, read_bytes

MAX_ROWS = 10_000_000


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
