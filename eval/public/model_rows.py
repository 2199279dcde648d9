"""Reads published iteration times by folder; keeps the rows whose model can be built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from itercast.eval.compare import console, stated_rows
from itercast.eval.public.benchmark import Rows
from itercast.microbench.importers import neusight
from itercast.microbench.importers.base import Imported
from itercast.microbench.importers.published import (
    iterations,
    kernelbench,
    megatron,
    mlperf,
    peft,
    vtrain,
)

READERS: Mapping[str, Callable[[Path], Imported]] = {
    "NeuSight": neusight.read,
    "iterations": iterations.read,
    "iterations-h100": iterations.read,
    "peft": peft.read,
    "vtrain": vtrain.read,
    "kernelbench": kernelbench.read,
    "megatron-lm": megatron.read,
    "mlperf-training": mlperf.read,
}


def read_iterations(public: Path, folder: str) -> Rows | None:
    """Published iterations of a folder; None, and a line that says so, where it is missing.

    How many rows the importer left out is printed by reason.
    """
    if not (public / folder).is_dir():
        console.print(f"no folder {str(public / folder)!r}: its lines are left out")
        return None
    found = READERS[folder](public / folder)
    for reason, count in sorted(found.dropped.items(), key=lambda item: -item[1]):
        console.print(f"{folder}: {count} rows not imported: {reason}")
    rows = found.rows["iteration"]
    rows = rows[rows["status"] == "ok"].reset_index(drop=True)
    return rows if "problem_source" in rows else stated_rows(rows)
