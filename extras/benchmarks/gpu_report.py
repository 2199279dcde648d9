"""Tables of ``itercast gpu-report``: errors of models trained on the rows of one GPU.

Op families are scored on held-out shapes and iterations as a whole (no model is trained on them).
A second GPU is forecast by models that were not trained on any row of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from itercast.eval.results import COLUMNS, RETEST, CaseResult, summary
from itercast.learners.bundle import Bundle
from itercast.learners.models.compared import BLEND
from itercast.learners.train import errors, hardware_of
from itercast.learners.training_rows import usable_rows
from itercast.microbench.ops import families
from itercast.microbench.store import Facts, read_rows

OPS_TARGET = "target: median 4 %"
ITERATIONS_TARGET = "target: geomean 3 % for DLRM, 2 % for transformers"
KINDS = {  # of models, by how their cases' names start
    "DLRM": ("dlrm",),
    "transformers": ("gpt", "bert", "llama", "vit", "switch"),
    "convolution networks": ("resnet", "unet"),
}
OTHERS = "other models"
Scores = Mapping[str, Mapping[str, float]]  # errors in % by name


def machines_table(root: Path, gpu: str) -> Table | None:
    """A table of the single GPUs of this kind, by the anchor: a product timed in every chunk.

    A GPU is slow where three quarters of its anchor times are longer than three quarters of the
    others'. None where fewer than two were measured.
    """
    rows = pd.concat([read_rows([root], n) for n in families()], ignore_index=True)
    rows = rows[rows["gpu"] == gpu] if "gpu" in rows else rows
    anchor = next((n for n in ("drift_us", "anchor_us") if n in rows), None)
    names = [n for n in ("host", "gpu_index", "gpu_uuid") if n in rows]
    if anchor is None or not names or len(rows.drop_duplicates(names)) < 2:
        return None
    table = Table(title=f"single machines of {gpu}, by a product timed in every chunk")
    heads = (*names, "rows", "throttled %", "SM MHz", "anchor us", "against the others %", "")
    for head in heads:
        table.add_column(head, justify="left" if head in ("host", "gpu_uuid", "") else "right")
    for where, mine in rows.groupby(names, dropna=False):
        own, others = mine[anchor].dropna(), rows[anchor].drop(mine.index).dropna()
        slow = own.quantile(0.25) > others.quantile(0.75)
        clock = 1e-6 * mine["sm_clock_hz"].median() if "sm_clock_hz" in mine else np.nan
        table.add_row(
            *(f"{v:g}" if isinstance(v, float) else str(v) for v in where),
            str(len(mine)),
            f"{100 * (mine['status'] == 'throttled').mean():.0f}",
            "-" if np.isnan(clock) else f"{clock:.0f}",
            f"{own.median():.1f}",
            f"{100 * (own.median() / others.median() - 1):+.1f}",
            "slow" if slow else "",
        )
    return table


def only_gpu(root: Path, gpu: str, folder: Path) -> Path:
    """Make a dataset root in ``folder`` that links to the rows of one GPU only."""
    if not root.is_dir():
        raise ValueError(f"data {str(root)!r}: no such folder")
    for found in sorted(root.glob(f"*/{gpu}")):
        link = folder / found.parent.name / gpu
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(found.resolve())
    if not folder.is_dir():
        known = sorted({p.name for p in root.glob("*/*") if p.is_dir() and p.parent.name[0] != "."})
        raise ValueError(f"gpu {gpu!r}: no rows under {root}; there are rows of {known}")
    return folder


def family_errors(report: Facts) -> Scores:
    """Errors of each family on held-out shapes, and the retest error of its rows."""
    floors = {name: entry["retest_ape_pct"] for name, entry in report.items()}
    return {
        name: {**entry["learners"][BLEND], **({RETEST: floors[name]} if floors[name] else {})}
        for name, entry in report.items()
    }


def unseen_errors(root: Path, bundle: Bundle) -> Scores:
    """Errors of each family of the bundle on the rows under ``root``, of an unseen GPU."""
    found = {}
    for name, rows in usable_rows([root], None).items():
        if name in bundle.models:
            priced = bundle.price(name, rows, hardware_of([root], rows))
            found[name] = errors(priced["predicted_us"].to_numpy(), rows["time_us"].to_numpy())
    return found


def iteration_errors(results: Sequence[CaseResult]) -> Scores:
    """Errors of iterations by kind of model: DLRM, transformers, convolution networks, others."""
    groups: dict[str, list[CaseResult]] = {kind: [] for kind in (*KINDS, OTHERS)}
    for r in results:
        kinds = (kind for kind, starts in KINDS.items() if r.case.startswith(starts))
        groups[next(kinds, OTHERS)].append(r)
    return {f"{kind} ({len(group)})": summary(group) for kind, group in groups.items() if group}


def error_table(title: str, scored: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of errors in % by name: absolute errors, bias (signed mean), retest; "-": unknown."""
    table = Table(title=f"{title}, errors in %")
    table.add_column("", overflow="fold")
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for name, scores in scored.items():
        cells = (f"{scores[key]:.1f}" if key in scores else "-" for key in COLUMNS.values())
        table.add_row(name, *cells)
    return table
