"""Calibrates a bundle with a few measured rows of a GPU, and its host with rows of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.learners.bundle import Bundle
from itercast.learners.family_model import FamilyModel
from itercast.learners.score_file import read_file
from itercast.learners.transfer.calibration import Calibration, coordinates, points
from itercast.microbench.hardware.host import (
    EVENT_US,
    LAUNCH_EVENT,
    REFERENCE,
    WARM_CALL,
    HostMachine,
)
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family

MAX_ROWS = 500  # of one family and GPU; more are enough for training


def calibrate(bundle: Bundle, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None) -> Bundle:
    """Return the bundle with the models of all families in ``rows`` calibrated, GPU by GPU.

    Earlier calibrations of the same family and GPU are replaced. ValueError where no row is of a
    family of the bundle.
    """
    rows = rows[rows["status"] == "ok"] if "status" in rows else rows
    rows = rows[rows["time_us"] > 0]
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
        asked = sorted(set(rows["family"].astype(str)))
        raise ValueError(
            f"rows of families {asked}: the bundle has models of {sorted(models)} only"
        )
    kept = {name: hardware[name] for name in {*bundle.gpus, *named}}
    return replace(bundle, models=models, gpus=kept)


def measure(
    model: FamilyModel, family: Family, rows: pd.DataFrame, gpus: Mapping[str, Gpu]
) -> Calibration:
    """Returns the calibration of one GPU: log errors of the uncalibrated model at its rows."""
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


def host_of_events(rows: pd.DataFrame, name: str, source: str) -> HostMachine | None:
    """Derives a host from measured times of Python and autograd events (rows of family ``host``).

    ``slowdown`` is the median over events of the measured time / the reference host's;
    ``launch_us`` the median time of a launch. None where no such row was measured beside a GPU.
    """
    rows = rows[rows["time_us"] > 0]
    rows = rows[rows["status"] == "ok"] if "status" in rows else rows
    mine = rows[rows["family"] == "host"]
    if not len(mine):
        return None
    events = mine[mine["op"].map(lambda op: op != "launch" and EVENT_US.get(op, 0.0) > 0)]
    if not len(events):
        return None
    tensors = events["tensors"].fillna(1) if "tensors" in events else np.ones(len(events))
    pairs = zip(events["op"], tensors, strict=True)
    reference_us = [REFERENCE.event_us(str(op), int(n)) for op, n in pairs]
    slowdown = float((events["time_us"] / reference_us).median())
    launches_us = _launches_us(rows)
    launch_us = slowdown * REFERENCE.launch_us
    if len(launches_us):
        launch_us = float(np.median(launches_us))
    return HostMachine(
        name=name, slowdown=round(slowdown, 3), launch_us=round(launch_us, 3), source=source
    )


def _launches_us(rows: pd.DataFrame) -> np.ndarray:
    """Measured host times of the launch of a pointwise op, in us.

    ``launch_us`` of pointwise ops and the event ``launch`` both count, as long as they take in a
    training step. Cold rows repeat the launch of their warm row and are left out.
    """
    events = rows.loc[(rows["family"] == "host") & (rows["op"] == "launch"), "time_us"]
    found = [events / LAUNCH_EVENT]
    if "launch_us" in rows:
        calls = rows[(rows["launch_us"] > 0) & (rows["family"] == "elementwise")]
        calls = calls[calls["cache"] != "cold"] if "cache" in calls else calls
        found.append(WARM_CALL * calls["launch_us"])
    launches: np.ndarray = pd.concat(found).to_numpy(dtype=float)
    return launches


def read_few(paths: Sequence[Path]) -> pd.DataFrame:
    """Read rows in dataset form from Parquet files; ValueError names a file that is not."""
    parts = {path: read_file(path) for path in paths}
    for path, part in parts.items():
        if "time_us" not in part:
            raise ValueError(f"rows {str(path)!r}: the column 'time_us' is missing")
    return pd.concat(parts.values(), ignore_index=True)
