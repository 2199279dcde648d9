"""Errors on each source's op rows, by models that were trained on the other sources alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.assumptions import leaving_out
from itercast.extras.imports.base import Hints
from itercast.extras.imports.sources import read_source
from itercast.extras.processes import processes
from itercast.extras.published.fits.shipped import MAX_ROWS, OWN, own_rows
from itercast.extras.published.left_out import compared
from itercast.extras.published.lines import FOLDS, LineResult, Rows
from itercast.extras.published.readers import gpus_of, reader_of
from itercast.learners.family_model import learn_quickly, prepare
from itercast.learners.features.table import shape_groups
from itercast.learners.models.trees import default_options
from itercast.learners.training_rows import subsample_evenly
from itercast.microbench.hardware.spec import gpu_names
from itercast.microbench.ops import families
from itercast.names import importers

log = logging.getLogger(__name__)
KNOWN_ROWS = 8_000  # of a family to learn from, at most
HELD_ROWS = 1_000  # of a family and source to forecast, at most
MIN_HELD_ROWS = 5
MIN_KNOWN_ROWS = 30  # of other sources; from fewer nothing is learned
PUBLISHER = "published by"  # column of op rows: their source; ops have a parameter of that name
NAME = "{}, source left out"  # of a family's results
PARTS_OF = {"aiconfigurator-more": "aiconfigurator"}  # folders that hold more of another source
# Raw traces, whose importer needs to be told the GPU; iterations of several sources.
NOT_READ = ("kineto", "iterations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A source's rows of a family that are forecast, and the rows to learn from.

    ``others`` are of other sources alone; ``all_rows`` also has shapes of the source that none of
    the rows ``held`` has.
    """

    family: str
    source: str
    held: Rows
    others: Rows
    all_rows: Rows


def readers(public: Path) -> dict[Path, str]:
    """Finds each folder's importer; skips folders without op rows and of several sources."""
    found = {path: reader_of(path.name) for path in sorted(public.iterdir())}
    return {
        path: reader
        for path, reader in found.items()
        if path.is_dir() and reader in importers() and reader not in NOT_READ
    }


def source_in(folder: str) -> str:
    """The source whose measurements a folder of this name holds."""
    return PARTS_OF.get(reader_of(folder), reader_of(folder))


def op_sources(public: Path) -> list[str]:
    """Names of the sources in a folder that may have op rows; ValueError where there is none."""
    if not public.is_dir():
        raise ValueError(f"{str(public)!r}: no such folder")
    if not (found := readers(public)):
        raise ValueError(f"{str(public)!r}: no folder of a source; known: itercast list sources")
    return sorted({source_in(path.name) for path in found})


def read_ops(public: Path) -> dict[str, Rows]:
    """Op rows of every source in a folder, and our own, by family, with the column PUBLISHER."""
    own = {name: own_rows(name) for name in MAX_ROWS}
    frames = {name: [rows.assign(**{PUBLISHER: OWN})] for name, rows in own.items() if len(rows)}
    for folder, reader in readers(public).items():
        source = source_in(folder.name)
        for family, rows in read_source(reader, folder, Hints()).rows.items():
            if family in families():
                usable = rows[(rows["status"] == "ok") & rows["gpu"].isin(gpu_names())]
                frames.setdefault(family, []).append(usable.assign(**{PUBLISHER: source}))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in sorted(frames.items())}


def splits(rows: Mapping[str, Rows], only: str = "", source: str = "") -> Iterator[Split]:
    """A split for each family that two sources have measured, and each of these sources.

    ``only``: of families whose name of results contains it; ``source``: of this source alone.
    """
    for name, table in rows.items():
        if only not in NAME.format(name) or table[PUBLISHER].nunique() < 2:
            continue
        for own in sorted(table[PUBLISHER].unique()):
            if source and own.casefold() != source.casefold():
                continue
            mine = (table[PUBLISHER] == own).to_numpy()
            part, others = table[mine].reset_index(drop=True), table[~mine]
            shapes = shape_groups(part, families()[name])
            drawn = np.random.default_rng(0).permutation(np.unique(shapes))[::FOLDS]
            held = np.isin(shapes, drawn)
            if held.sum() >= MIN_HELD_ROWS and len(others) >= MIN_KNOWN_ROWS:
                yield Split(
                    family=name,
                    source=own,
                    held=subsample_evenly(part[held], HELD_ROWS),
                    others=subsample_evenly(others, KNOWN_ROWS),
                    all_rows=subsample_evenly(
                        pd.concat([others, part[~held]], ignore_index=True), KNOWN_ROWS
                    ),
                )


def run_left_out(public: Path, only: str = "", source: str = "") -> Iterator[LineResult]:
    """Errors of each family on each source's rows, without the source and with other shapes of it.

    ``only`` and ``source`` as for ``splits``.
    """
    if not any(only in NAME.format(name) for name in families()):
        return
    by_source: dict[str, list[Split]] = {}
    for split in splits(read_ops(public), only, source):
        by_source.setdefault(split.source, []).append(split)
    for own, some in by_source.items():
        start = time.monotonic()
        without = _forecasts_without(own, [(s.family, s.others, s.held) for s in some])
        with_it = _forecasts_without("", [(s.family, s.all_rows, s.held) for s in some])
        seconds = (time.monotonic() - start) / len(some)
        log.info("%s left out: %d families, %.0f s each", own, len(some), seconds)
        for split, one, other in zip(some, without, with_it, strict=True):
            measured = split.held["time_us"].to_numpy(dtype=float)
            yield compared(NAME.format(split.family), own, measured, one, other, seconds)


def _forecasts_without(source: str, jobs: list[tuple[str, Rows, Rows]]) -> list[np.ndarray]:
    """Forecasts in us of jobs (family, rows to learn from, rows to forecast), in new processes."""
    with leaving_out(source), processes(len(jobs)) as pool:
        return list(pool.map(_forecast, jobs))


def _forecast(job: tuple[str, Rows, Rows]) -> np.ndarray:
    """Forecasts of a family's model without cross-validation and intervals."""
    name, known, held = job
    prepared = prepare(known, families()[name], gpus_of(known))
    model = learn_quickly(prepared, np.arange(len(known)), default_options(prepared.table))
    gpus = {**gpus_of(held), **model.source_gpus.gpus}
    return np.asarray(model.predict(held.reset_index(drop=True), families()[name], gpus).time_us)
