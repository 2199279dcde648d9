"""Price any file in dataset form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa

from learners.bundle import COLUMNS, Bundle
from learners.features.table import ordinary
from microbench.hardware.spec import Gpu, gpu_names, load_gpu
from microbench.store import write_atomic


def read_file(path: Path) -> pd.DataFrame:
    """A file in dataset form; ValueError in one line for anything else."""
    try:
        rows = pd.read_parquet(path)
    except (OSError, pa.ArrowInvalid) as exc:
        raise ValueError(f"rows {str(path)!r}: not a readable Parquet file") from exc
    missing = [c for c in ("family", "gpu") if c not in rows]
    if missing:
        raise ValueError(f"rows {str(path)!r}: the column {missing[0]!r} is missing")
    return rows


def price_file(
    path: Path, bundle: Bundle, out: Path, gpus: Mapping[str, Gpu] | None = None
) -> None:
    """Write the rows of ``path`` with predicted_us, its quantiles and in_envelope to ``out``.

    GPUs that the bundle does not know are those of ``gpus``, else of the hardware files; ValueError
    names one that nobody knows. Rows measured under load (``table.ordinary``) are written
    without a forecast, which would be of another condition.
    """
    rows = read_file(path)
    rows = rows.drop(columns=COLUMNS, errors="ignore").reset_index(drop=True)
    files, own = {*gpu_names()} - {"cpu"}, {**bundle.gpus, **(gpus or {})}
    strange = {str(name) for name in rows["gpu"].unique()} - own.keys()
    if unknown := sorted(strange - files):
        known = sorted(files | own.keys())
        raise ValueError(f"rows {str(path)!r}: unknown gpu {unknown[0]!r}; known: {known}")
    gpus = {**{name: load_gpu(name) for name in strange}, **(gpus or {})}
    families = ordinary(rows).groupby("family", sort=False)
    parts = [bundle.price(str(name), part, gpus) for name, part in families]
    priced = pd.concat(parts).sort_index() if parts else pd.DataFrame(columns=COLUMNS)
    write_atomic(out, rows.join(priced).to_parquet(None, index=False))
