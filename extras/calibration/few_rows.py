"""Calibrates a bundle with a few measured rows of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from itercast.learners.bundle import Bundle
from itercast.learners.family_model import FamilyModel
from itercast.learners.seen_shapes import with_shapes
from itercast.learners.transfer.calibration import Calibration, coordinates, points
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
        family = families()[str(name)]
        found = {**model.calibrations, str(gpu): measure(model, family, mine, hardware)}
        shapes = with_shapes(model.facts.get("shapes", ""), mine, family)
        facts = {**model.facts, "shapes": shapes}
        models[str(name)] = replace(model, calibrations=found, facts=facts)
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
