"""Adds forecasts to the rows of a Parquet file in dataset form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base import close_names
from itercast.capture.base.files import write_atomic
from itercast.learners.bundle import COLUMNS, Bundle
from itercast.learners.score_file import check_parameters
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu


def write_forecasts(
    rows: pd.DataFrame,
    bundle: Bundle,
    out: Path,
    gpus: Mapping[str, Gpu] | None = None,
    among: Sequence[str] = (),
) -> None:
    """Write rows in dataset form, with the columns of ``Bundle.price`` added, to a Parquet file.

    ``among``: software names; the column ``stack`` becomes the one whose forecast is the shortest.
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
