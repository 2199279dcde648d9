"""Trains families as Ray tasks, on one machine or several.

A task returns a bundle of its family as a zip archive, or an error as JSON: this process loads
nothing from the cluster but those bytes.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from itercast.extras.fleet.driver import connected
from itercast.extras.roots.urls import fetched
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import Anchors, undisturbed
from itercast.learners.train import (
    FamilyReport,
    FitAll,
    Fits,
    OnProgress,
    TrainSettings,
    fit_in_turn,
)
from itercast.learners.training_rows import usable_rows
from itercast.learners.unfinished import read_family, write_family
from itercast.microbench.store import Row

SENT_SETTINGS = ("trials", "memory", "storage", "gpus")
TRIES = 3  # of a task whose node dies
ZIP = b"PK"  # how a zip archive begins


def through_ray(address: str, data: Sequence[str]) -> FitAll:
    """Train families as tasks of the Ray cluster at ``address``, or of this machine (``local``).

    ``data``: dataset roots, folders that all machines have, or URLs.
    """

    def fit_all(
        tables: Mapping[str, pd.DataFrame],
        anchors: Anchors,
        settings: TrainSettings,
        progress: OnProgress | None,
    ) -> Fits:
        """Yields each family's report and bundle as its task ends; the largest begin first."""
        plain = {name: getattr(settings, name) for name in SENT_SETTINGS}
        plain |= {"data": data, "anchors": [[*key, *us] for key, us in anchors.items()]}
        with connected(address) as ray:
            memory = settings.memory or 0
            if memory > (largest := max(n["Resources"].get("memory", 0) for n in ray.nodes())):
                sizes = f"{memory / 2**30:.1f}GiB", f"{largest / 2**30:.1f}GiB"
                raise ValueError(f"memory {sizes[0]}: no Ray node has more than {sizes[1]}")
            task = ray.remote(fitted).options(num_cpus=1, memory=memory, max_retries=TRIES)
            largest_first = sorted(tables, key=lambda name: -len(tables[name]))
            orders = {name: json.dumps({**plain, "name": name}) for name in largest_first}
            waiting = {task.remote(order.encode()): name for name, order in orders.items()}
            while waiting:
                if progress:
                    progress(f"{len(waiting)} families")
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                name = waiting.pop(done)
                try:
                    returned = ray.get(done)
                except ray.exceptions.RayError as exc:
                    raise OSError(f"{name}: its task died: {type(exc).__name__}") from exc
                yield name, *_unpacked(name, returned)

    return fit_all


def fitted(order: bytes) -> bytes:
    """A Ray task: train a family as ``order`` (JSON) says; its bundle, zipped, or an error."""
    try:
        return _fitted(json.loads(order))
    except (ValueError, OSError) as exc:
        message = str(exc).splitlines()[0] if str(exc) else repr(exc)
        return json.dumps({"error": message}).encode()


def _fitted(plain: Row) -> bytes:
    """Train the family that the order names, on rows read here; its bundle, zipped."""
    name, roots = plain["name"], [fetched(where) for where in plain["data"]]
    settings = TrainSettings(roots=roots, **{key: plain[key] for key in SENT_SETTINGS})
    anchors = {
        (gpu, threads): (anchor_us, serial_us)
        for gpu, threads, anchor_us, serial_us in plain["anchors"]
    }
    rows = undisturbed(usable_rows(roots, [name], settings.memory)[name], anchors)
    ((_, report, bundle),) = fit_in_turn({name: rows}, anchors, settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        write_family(folder, name, report, bundle)
        return Path(shutil.make_archive(f"{scratch}/packed", "zip", folder)).read_bytes()


def _unpacked(name: str, returned: bytes) -> tuple[FamilyReport, Bundle]:
    """The report and the bundle that a task returned; ValueError where it failed."""
    if not returned.startswith(ZIP):
        raise ValueError(f"{name}: {json.loads(returned)['error']}")
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(io.BytesIO(returned)) as packed:
        packed.extractall(place)
        return read_family(Path(place))
