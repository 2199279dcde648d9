"""Writes imported rows as a dataset with cards."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

import pandas as pd

from itercast.extras.imports.base import Imported
from itercast.microbench import store
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.store import Row


def write(imported: Imported, out: Path, own: Gpu | None = None) -> int:
    """Write one part per imported file; returns the number of rows.

    Importing a file again replaces its rows. ``own``: a GPU from a hardware file of the user.
    """
    written = 0
    for family, rows in imported.rows.items():
        for gpu, mine in rows.groupby("gpu", sort=True):
            facts = card(imported, str(gpu), mine, own)
            for run_id, part in mine.groupby("run_id", sort=True):
                name = hashlib.sha256(str(run_id).encode()).hexdigest()[:12]
                store.write_part(out, family, str(gpu), part, name, imported.about.source, facts)
            store.write_card(out / family / str(gpu) / imported.about.source, facts)
            written += len(mine)
    return written


def card(imported: Imported, gpu: str, rows: pd.DataFrame, own: Gpu | None) -> Row:
    """Card of imported rows: their origin, how they were measured, what was left out."""
    facts: Row = {
        "what": f"published measurements, imported from {imported.about.source}",
        "when": datetime.date.today().isoformat(),
        "where": imported.about.where,
        "commit": imported.commit,
        "how": imported.about.conventions,
        "licence": imported.about.licence,
        "versions": sorted(str(s) for s in rows["stack"].unique()),
        "files": sorted(str(r) for r in rows["run_id"].unique()),
        "dropped_in_this_import": dict(imported.dropped),
    }
    if own is not None and own.name == gpu:
        facts["hardware"] = own.to_dict()
    elif gpu in gpu_names():
        facts["hardware"] = load_gpu(gpu).to_dict()
    return facts
