"""Reads what others published: importers by name, iterations by folder, measured nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.eval.compare import stated_rows
from itercast.eval.tables import beside_output
from itercast.extras.imports.base import Hints
from itercast.extras.imports.sources import Reader, read_source
from itercast.extras.published.mapped.reader import importer
from itercast.extras.published.sources import iterations, op_tables
from itercast.microbench.hardware.spec import Gpu, load_gpu

MAPPINGS = Path(__file__).parent / "sources/mappings"
PUBLISHED: Mapping[str, Reader] = {
    "iterations": iterations.read,
    "kineto-traces": op_tables.read,
    **{path.stem: importer(path) for path in sorted(MAPPINGS.glob("*.yaml"))},
}
LABELS = Path("scripts/asplos/label")
LAYER = r"(?:^|_)(?:layer|h|layers)_0|\.(?:layer|h|layers)\.0"  # as transformers names blocks
READER_OF = {"NeuSight": "neusight", "iterations-h100": "iterations", "vidur-h100": "vidur"}
BUILDERS = ("layer", "problem")  # of models that are neither cases nor configurations


def gpus_of(rows: pd.DataFrame) -> dict[str, Gpu]:
    """The GPUs that rows were measured on, by name."""
    return {str(name): load_gpu(str(name)) for name in rows["gpu"].unique()}


def reader_of(folder: str) -> str:
    """The importer of a folder of published measurements: mostly its name."""
    return READER_OF.get(folder, folder)


def read_iterations(public: Path, folder: str) -> pd.DataFrame | None:
    """Published iterations of a folder; None, and a line that says so, where it is missing.

    How many rows the importer left out is printed by reason.
    """
    if not (public / folder).is_dir():
        beside_output().print(f"no folder {str(public / folder)!r}: its lines are left out")
        return None
    found = read_source(reader_of(folder), public / folder, Hints())
    for reason, count in sorted(found.dropped.items(), key=lambda item: -item[1]):
        beside_output().print(f"{folder}: {count} rows not imported: {reason}")
    rows = found.rows["iteration"]
    rows = rows[rows["status"] == "ok"].reset_index(drop=True)
    return rows if set(rows["builder"]) & set(BUILDERS) else stated_rows(rows)


def node_sums_us(root: Path) -> dict[str, dict[str, float]]:
    """Step times from sums of NeuSight's measured ops (nodes): the error left if all were known.

    Summed times ``step`` and ``backward`` in us, by label file, for labels with a node table. The
    tables hold the nodes of a model with one layer, in ms; nodes of that layer count ``num_layer``
    times. Accumulating gradients is part of the backward pass.
    """
    found = {}
    for path in sorted((root / LABELS).rglob("*.csv")):
        nodes, label = pd.read_csv(path), json.loads(path.with_suffix(".json").read_text())
        inside = nodes["Name"].astype(str).str.contains(LAYER)
        inside |= nodes["meta"].astype(str).str.contains(LAYER)
        times = np.where(inside, float(label["num_layer"]), 1.0)
        us = {c: float((nodes[f"{c}_latency"] * times).sum() * 1e3) for c in ("fw", "bw", "acc")}
        origin = path.with_suffix(".json").relative_to(root)
        found[f"{origin}:1"] = {"step": sum(us.values()), "backward": us["bw"] + us["acc"]}
    return found
