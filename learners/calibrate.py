"""Calibrates a bundle with a few measured rows of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from learners.bundle import Bundle
from learners.family_model import FamilyModel
from learners.features.table import without_load
from learners.models.residuals import coordinates
from learners.transfer.calibration import Calibration, points
from microbench.hardware.spec import Gpu, load_gpu
from microbench.ops import families
from microbench.ops.family import Family

MAX_ROWS = 500  # of one family and GPU; more are enough for training


def calibrate(bundle: Bundle, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None) -> Bundle:
    """Return the bundle with every family that has rows calibrated by them, GPU by GPU.

    Earlier calibrations of the same family and GPU are replaced. ValueError where no row is of a
    family of the bundle.
    """
    rows = rows[rows["status"] == "ok"] if "status" in rows else rows
    rows = without_load(rows[rows["time_us"] > 0])
    named = {str(name): str(name) for name in rows["gpu"].unique()}
    hardware = {**bundle.gpus, **(gpus or {})}
    hardware |= {name: load_gpu(name) for name in named if name not in hardware}
    models, used = dict(bundle.models), 0
    for (name, gpu), mine in rows.groupby(["family", "gpu"], sort=True):
        if name not in models:
            continue
        model = models[str(name)]
        found = measure(model, families()[str(name)], mine, hardware)
        models[str(name)] = replace(model, calibrations={**model.calibrations, str(gpu): found})
        used += len(mine)
    if not used:
        raise ValueError(f"no row is of a family of this bundle, which has {sorted(models)}")
    kept = {name: hardware[name] for name in {*bundle.gpus, *named}}
    return replace(bundle, models=models, gpus=kept)


def measure(
    model: FamilyModel, family: Family, rows: pd.DataFrame, gpus: Mapping[str, Gpu]
) -> Calibration:
    """Calibration of one GPU: log errors of the uncalibrated model at its rows."""
    if len(rows) > MAX_ROWS:
        gpu = rows["gpu"].iloc[0]
        raise ValueError(
            f"{len(rows)} rows of {family.name} on {gpu}: at most {MAX_ROWS} calibrate; "
            "train a bundle on more"
        )
    rows = model.as_measured(rows.reset_index(drop=True), family)
    found = replace(model, calibrations={}).predict(rows, family, gpus)
    kind, at = coordinates(rows, family)
    error = np.log(rows["time_us"].to_numpy(float) / found.time_us)
    return Calibration(kind=kind, at=points(at, found.roofline_us), value=error)


def read_few(paths: Sequence[Path]) -> pd.DataFrame:
    """Read rows in dataset form from Parquet files; ValueError names a file that is not."""
    parts = []
    for path in paths:
        try:
            part = pd.read_parquet(path)
        except (OSError, ValueError) as exc:
            raise ValueError(f"rows {str(path)!r}: not a readable Parquet file") from exc
        missing = [c for c in ("family", "gpu", "time_us") if c not in part]
        if missing:
            raise ValueError(f"rows {str(path)!r}: the column {missing[0]!r} is missing")
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
