"""Calibrates a bundle with a few measured rows of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from itercast.learners.bundle import Bundle
from itercast.learners.family_model import FamilyModel
from itercast.learners.features.machine_speed import Speed, at_reference_us
from itercast.learners.seen_shapes import with_shapes
from itercast.learners.transfer.calibration import Calibration, coordinates, points
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family

MAX_ROWS = 2000  # of one family and GPU; more are enough for training


def calibrate_bundle(
    bundle: Bundle, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
) -> Bundle:
    """Return the bundle with the models of all families in ``rows`` calibrated, GPU by GPU.

    Times of a CPU's rows are corrected to the speed at which the bundle was trained. Earlier
    calibrations of the same family and GPU are replaced. ValueError where no row is of a family of
    the bundle.
    """
    rows = rows[rows["status"] == "ok"] if "status" in rows else rows
    rows = rows[rows["time_us"] > 0]
    names = set(rows["gpu"].astype(str))
    hardware = {**bundle.gpus, **(gpus or {})}
    hardware |= {name: load_gpu(name) for name in names if name not in hardware}
    models, used = dict(bundle.models), 0
    for (name, gpu), part in rows.groupby(["family", "gpu"], sort=True):
        if name not in models:
            continue
        model, family = models[str(name)], families()[str(name)]
        speed = Speed(anchors=bundle.anchors, sensitivity=model.sensitivity)
        part = part.assign(time_us=at_reference_us(part, speed))
        calibration = calibrate_model(model, family, part, hardware)
        shapes = with_shapes(model.facts.get("shapes", ""), part, family)
        models[str(name)] = replace(
            model,
            calibrations={**model.calibrations, str(gpu): calibration},
            facts={**model.facts, "shapes": shapes},
        )
        used += len(part)
    if not used:
        measured = sorted(set(rows["family"].astype(str)))
        raise ValueError(
            f"rows of families {measured}: the bundle has models of {sorted(models)} only"
        )
    return replace(
        bundle, models=models, gpus={name: hardware[name] for name in {*bundle.gpus, *names}}
    )


def calibrate_model(
    model: FamilyModel, family: Family, rows: pd.DataFrame, gpus: Mapping[str, Gpu]
) -> Calibration:
    """Calibration of the rows' GPU: log(measured / forecast) of each row by the model as it is."""
    if len(rows) > MAX_ROWS:
        gpu = rows["gpu"].iloc[0]
        raise ValueError(
            f"{len(rows)} rows of {family.name} on {gpu}: at most {MAX_ROWS} calibrate; "
            "train a bundle on more"
        )
    rows = model.as_measured(rows.reset_index(drop=True), family)
    forecast = replace(model, calibrations={}).predict(rows, family, gpus)
    kind, at = coordinates(rows, family)
    error = np.log(rows["time_us"].to_numpy(float) / forecast.time_us)
    return Calibration(kind=kind, at=points(at, forecast.roofline_us), value=error)
