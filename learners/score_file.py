"""Adds forecasts to the rows of a Parquet file in dataset form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from itercast.capture.base import close_names
from itercast.capture.base.files import write_atomic
from itercast.learners.bundle import COLUMNS, Bundle
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.ops import families


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
    """Read rows in dataset form from Parquet files; ValueError names a file that is not."""
    parts = {path: read_file(path) for path in paths}
    for path, part in parts.items():
        if "time_us" not in part:
            raise ValueError(f"rows {str(path)!r}: the column 'time_us' is missing")
    return pd.concat(parts.values(), ignore_index=True)


def check_parameters(name: str, rows: pd.DataFrame) -> None:
    """ValueError where rows of a family lack a parameter that has no default."""
    family = families().get(name)
    for f in fields(family.params) if family is not None else ():
        if f.default is MISSING:
            lacking = rows[f.name].isna() if f.name in rows else pd.Series(True, rows.index)
            if lacking.any():
                where = f"{lacking.sum()} of {len(rows)} rows"
                raise ValueError(f"rows of family {name}: {f.name} is missing in {where}")


def write_forecasts(
    rows: pd.DataFrame,
    bundle: Bundle,
    out: Path,
    gpus: Mapping[str, Gpu] | None = None,
    among: Sequence[str] = (),
) -> None:
    """Write rows in dataset form, with the columns of ``Bundle.price`` added, to a Parquet file.

    ``among``: the column ``stack`` becomes the one of these whose forecast is the shortest.
    Hardware is that of ``gpus``, else the bundle's, else a hardware file's; ValueError names a GPU
    that none of them has.
    """
    rows = rows.drop(columns=COLUMNS, errors="ignore").reset_index(drop=True)
    files, own = {*gpu_names()} - {"cpu"}, {**bundle.gpus, **(gpus or {})}
    unseen = {str(name) for name in rows["gpu"].unique()} - own.keys()
    if unknown := sorted(unseen - files):
        raise close_names.unknown("gpu", unknown[0], sorted(files | own.keys()))
    gpus = {**{name: load_gpu(name) for name in unseen}, **(gpus or {})}

    def price(rows: pd.DataFrame) -> pd.DataFrame:
        families = rows.groupby("family", sort=False)
        for name, part in families:
            check_parameters(str(name), part)
        parts = [bundle.price(str(name), part, gpus) for name, part in families]
        return pd.concat(parts).sort_index() if parts else pd.DataFrame(columns=COLUMNS)

    if among and len(rows):
        rows = _fastest(rows, price, bundle, among)
    priced = price(rows)
    write_atomic(out, rows.join(priced).to_parquet(None, index=False))


def _fastest(
    rows: pd.DataFrame,
    price: Callable[[pd.DataFrame], pd.DataFrame],
    bundle: Bundle,
    among: Sequence[str],
) -> pd.DataFrame:
    """The rows under the software that is forecast to be the fastest for each."""
    for name in rows["family"].unique():
        model = bundle.models.get(name)
        known = model.encoder.vocabulary.get("stack", []) if model else []
        if unknown := sorted(set(among) - set(known)):
            raise ValueError(f"no rows of {name} under {unknown[0]!r}; known: {', '.join(known)}")
    times = [price(rows.assign(stack=stack))["predicted_us"].to_numpy() for stack in among]
    return rows.assign(stack=np.array(among, dtype=object)[np.argmin(times, axis=0)])
