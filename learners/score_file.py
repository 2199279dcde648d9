"""Reads Parquet files in dataset form, and checks their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import pandas as pd
import pyarrow as pa

from itercast.microbench.ops import families
from itercast.microbench.store import read_rows


def read_file(path: Path) -> pd.DataFrame:
    """Read a Parquet file in dataset form; ValueError, in one line, for anything else."""
    try:
        rows = pd.read_parquet(path)
    except FileNotFoundError as exc:
        raise ValueError(f"rows {str(path)!r}: no such file") from exc
    except (OSError, pa.ArrowException, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"rows {str(path)!r}: not a readable Parquet file") from exc
    missing = [c for c in ("family", "gpu") if c not in rows]
    if missing:
        raise ValueError(f"rows {str(path)!r}: the column {missing[0]!r} is missing")
    if not len(rows):
        raise ValueError(f"rows {str(path)!r}: it holds no row")
    return rows


def read_few(paths: Sequence[Path]) -> pd.DataFrame:
    """Read rows of ops from Parquet files in dataset form, and from dataset roots.

    ValueError names a file that is no such file, and a folder without rows.
    """
    parts = {path: _of_root(path) if path.is_dir() else read_file(path) for path in paths}
    for path, part in parts.items():
        if "time_us" not in part:
            raise ValueError(f"rows {str(path)!r}: the column 'time_us' is missing")
    return pd.concat(parts.values(), ignore_index=True)


def _of_root(root: Path) -> pd.DataFrame:
    """The rows of all op families under a dataset root."""
    tables = [rows for name in families() if len(rows := read_rows([root], name))]
    if not tables:
        raise ValueError(f"rows {str(root)!r}: no rows of a dataset root in this folder")
    return pd.concat(tables, ignore_index=True)


def check_parameters(name: str, rows: pd.DataFrame) -> None:
    """ValueError where rows of a family lack a parameter that has no default."""
    family = families().get(name)
    for f in fields(family.params) if family is not None else ():
        if f.default is MISSING:
            lacking = rows[f.name].isna() if f.name in rows else pd.Series(True, rows.index)
            if lacking.any():
                where = f"{lacking.sum()} of {len(rows)} rows"
                raise ValueError(f"rows of family {name}: {f.name} is missing in {where}")
