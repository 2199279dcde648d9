"""Families that a training has finished, as files: kept until the whole bundle is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from itercast.capture.base.cache_folder import digest_of_code
from itercast.capture.base.files import folder_at_once
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import Anchors
from itercast.learners.held_out import load_held_out, save_held_out
from itercast.learners.train import (
    SCORES,
    FamilyReport,
    FitAll,
    Fits,
    OnProgress,
    TrainReport,
    TrainSettings,
    digest_of,
)

ROOT = Path(__file__).parents[1]
# That decides what is learned from rows.
CODE = [ROOT / room for room in ("learners", "microbench/ops", "extras")]


def unfinished(out: Path) -> Path:
    """The folder of the families that a training of the bundle ``out`` has finished."""
    return out.absolute().with_name(f".{out.name}.families")


def resumed(out: Path, fit_all: FitAll) -> FitAll:
    """Trains only families that an earlier training of ``out`` did not finish on the same rows."""
    place = unfinished(out)

    def fit(
        tables: Mapping[str, pd.DataFrame],
        anchors: Anchors,
        settings: TrainSettings,
        on_progress: OnProgress | None,
    ) -> Fits:
        """Yields finished families from disk, then trains the rest and keeps each as it ends."""
        folders = {
            name: place / name / _key(rows, anchors, settings) for name, rows in tables.items()
        }
        done = {name: folder for name, folder in folders.items() if folder.is_dir()}
        if on_progress and done:
            on_progress(f"{len(done)} families of an earlier run are read")
        for name, folder in done.items():
            yield name, *read_family(folder)
        left = {name: rows for name, rows in tables.items() if name not in done}
        for name, report, bundle in fit_all(left, anchors, settings, on_progress) if left else ():
            with folder_at_once(folders[name]) as fresh:
                write_family(fresh, name, report, bundle)
            yield name, report, bundle

    return fit


def _key(rows: pd.DataFrame, anchors: Anchors, settings: TrainSettings) -> str:
    """Digest of all that a family's model depends on: rows, options, code."""
    gpus = json.dumps(settings.gpus, sort_keys=True)
    options = (settings.trials, settings.memory, settings.storage, gpus, sorted(anchors.items()))
    text = repr((digest_of(rows), options, digest_of_code(*CODE)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forget(out: Path) -> None:
    """Remove the families of a training whose bundle is written."""
    shutil.rmtree(unfinished(out), ignore_errors=True)


def write_family(folder: Path, name: str, report: FamilyReport, bundle: Bundle) -> None:
    """Write a bundle of one family, with its held-out forecasts and its scores."""
    bundle.save(folder)
    save_held_out(folder, report.held_out)
    scores = TrainReport(families={name: report}).to_dict()
    (folder / SCORES).write_text(json.dumps(scores[name]))


def read_family(folder: Path) -> tuple[FamilyReport, Bundle]:
    """The report and the bundle of a family that ``write_family`` wrote."""
    scores = json.loads((folder / SCORES).read_text())
    return FamilyReport(**scores, held_out=load_held_out(folder)), Bundle.load(folder)
