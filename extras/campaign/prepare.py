"""Prepares a campaign without a GPU: captures models, chooses points to repeat."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.extras.campaign.archive import unpack
from itercast.extras.campaign.catalogue import catalogue, points_of_models
from itercast.extras.campaign.drawn_from import FILE, shapes_by_model
from itercast.microbench import store
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family, Point, parameter_types
from itercast.microbench.store import read_rows
from itercast.microbench.sweep.captured_points import (
    by_turns,
    check_points,
    points_file,
    points_path,
    write_points,
)
from itercast.microbench.sweep.cards import COMMIT, commit

log = logging.getLogger("itercast.campaign")
UNSEEN = "points-unseen.json"
PREPARED_POINTS = {"unseen": UNSEEN, "second": "points-second.json"}  # by plan
SIZED_FOR = "h100-sxm-80gb"  # whose time decides how often a call is drawn
COMMIT_FILE = "commit.txt"


def prepare(folder: Path, seed: int, archive: Path | None, plan: str = "") -> None:
    """Write what a campaign needs: points of captured models, git commit, points of an archive.

    Of plan ``second`` the points of the catalogue's models, at the roofline of GPU SIZED_FOR.
    """
    write_atomic(folder / COMMIT_FILE, commit().encode())
    if plan == "second":
        swept = [model for model in catalogue() if not model.held_out]
        points = points_of_models(load_gpu(SIZED_FOR), seed, swept)
        write_points(folder / PREPARED_POINTS[plan], {n: list(p) for n, p in points.items()})
        write_atomic(folder / FILE, json.dumps(shapes_by_model(points)).encode())
        sizes = ", ".join(
            f"{len(points_of_family)} of {name}" for name, points_of_family in points.items()
        )
        log.info("points of %d models: %s", len(swept), sizes)
        return
    path = points_file(folder, "cuda", seed)
    log.info("%d points of captured models: %s", check_points(path), path)
    if archive is None:
        return
    with tempfile.TemporaryDirectory() as unpacked:
        unpack(archive, Path(unpacked))
        gpus = sorted(store.read_hardware([Path(unpacked)]))
        if len(gpus) != 1:
            raise ValueError(f"archive {str(archive)!r}: expected rows of one GPU, got {gpus}")
        count = write_measured_points(Path(unpacked), gpus[0], folder / UNSEEN)
    log.info("%d points measured on %s: %s", count, gpus[0], folder / UNSEEN)


def use_prepared(folder: Path, root: Path, seed: int) -> None:
    """Copy the prepared files to where a sweep looks for them.

    The prepared git commit goes into the environment, so that cards of rows name it where there is
    no git.
    """
    captured, wanted = points_path(folder, "cuda", seed), points_path(root, "cuda", seed)
    for prepared, path in ((captured, wanted), (folder / FILE, root / FILE)):
        if prepared.is_file() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(prepared, path)
    if (folder / COMMIT_FILE).is_file():
        os.environ.setdefault(COMMIT, (folder / COMMIT_FILE).read_text().strip())


def points_of_rows(root: Path, gpu: str) -> dict[str, list[Point]]:
    """Distinct points by family that a GPU has ok rows of under ``root``, without collectives.

    Kinds take turns, so that the beginning of the list is spread evenly.
    """
    points_by_family: dict[str, list[Point]] = {}
    for name, family in families().items():
        rows = read_rows([root], name)
        if family.ranks > 1 or rows.empty:
            continue
        rows = rows[(rows["gpu"] == gpu) & (rows["status"] == "ok")]
        points = dict.fromkeys(point_of_row(family, row) for row in rows.to_dict("records"))
        if points:
            points_by_family[name] = by_turns(list(points), seed=0)
    return points_by_family


def point_of_row(family: Family, row: Mapping[Hashable, Any]) -> Point:
    """The parameters in a row; missing columns and NaN leave a parameter at its default.

    In columns with empty cells pandas has read integers and booleans as floats.
    """
    params = {}
    for name, kind in parameter_types(family.params).items():
        if not pd.isna(value := row.get(name)):
            params[name] = kind(value)
    return family.params(**params)


def write_measured_points(root: Path, gpu: str, path: Path) -> int:
    """Write the points measured under ``root``, for another GPU to repeat; returns their number."""
    points = points_of_rows(root, gpu)
    write_points(path, points)
    return sum(map(len, points.values()))
