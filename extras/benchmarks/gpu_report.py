"""Tables of ``itercast gpu-report``: errors of models trained on the rows of one GPU.

Op families are scored on held-out models, where it is known which models rows were drawn from, else
on held-out shapes; iterations as a whole (no model is trained on them).
A second GPU is forecast by models that were not trained on any row of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from itercast.eval.results import COLUMNS, RETEST, CaseResult, summary
from itercast.eval.tables import headed, one_decimal
from itercast.extras.benchmarks.left_out_models import model_errors, model_table
from itercast.extras.campaign.drawn_from import ShapesByModel
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
    """A line for each physical GPU of this kind: how its anchor times compare with the others'.

    The anchor is a matrix product that is timed beside every chunk of points. A GPU is called slow
    if three quarters of its anchor times are longer than three quarters of the others'. None where
    fewer than two GPUs were measured.
    """
    rows = pd.concat([read_rows([root], n) for n in families()], ignore_index=True)
    rows = rows[rows["gpu"] == gpu] if "gpu" in rows else rows
    anchor = next((n for n in ("drift_us", "anchor_us") if n in rows), None)
    names = [n for n in ("host", "gpu_index", "gpu_uuid") if n in rows]
    if anchor is None or not names or len(rows.drop_duplicates(names)) < 2:
        return None
    title = f"single machines of {gpu}, by a product timed in every chunk"
    heads = (*names, "rows", "throttled %", "SM MHz", "anchor us", "against the others %", "")
    table = headed(title, *heads, texts=("host", "gpu_uuid", ""))
    for machine, part in rows.groupby(names, dropna=False):
        own_us, others_us = part[anchor].dropna(), rows[anchor].drop(part.index).dropna()
        slow = own_us.quantile(0.25) > others_us.quantile(0.75)
        clock_mhz = 1e-6 * part["sm_clock_hz"].median() if "sm_clock_hz" in part else np.nan
        table.add_row(
            *(f"{v:g}" if isinstance(v, float) else str(v) for v in machine),
            str(len(part)),
            f"{100 * (part['status'] == 'throttled').mean():.0f}",
            "-" if np.isnan(clock_mhz) else f"{clock_mhz:.0f}",
            f"{own_us.median():.1f}",
            f"{100 * (own_us.median() / others_us.median() - 1):+.1f}",
            "slow" if slow else "",
        )
    return table


def only_gpu(root: Path, gpu: str, folder: Path) -> Path:
    """Make a dataset root in ``folder`` that links to the rows of one GPU only."""
    if not root.is_dir():
        raise ValueError(f"data {str(root)!r}: no such folder")
    for rows in sorted(root.glob(f"*/{gpu}")):  # folder of a family and GPU
        link = folder / rows.parent.name / gpu
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(rows.resolve())
    if not folder.is_dir():
        known = sorted({p.name for p in root.glob("*/*") if p.is_dir() and p.parent.name[0] != "."})
        raise ValueError(f"gpu {gpu!r}: no rows under {root}; there are rows of {known}")
    return folder


def op_table(gpu: str, root: Path, drawn: Mapping[str, ShapesByModel], report: Facts) -> Table:
    """Errors of each family on models left out, where ``drawn`` says which models rows are of.

    Else on shapes left out, as the training on the rows under ``root`` scored them (``report``).
    """
    if not drawn:
        scores = {
            name: {**entry["learners"][BLEND], RETEST: entry["retest_ape_pct"]}
            for name, entry in report.items()
        }
        return error_table(f"{gpu}: ops, shapes left out; {OPS_TARGET}", scores)
    scored = {
        name: model_errors(rows, families()[name], hardware_of([root], rows), drawn.get(name, {}))
        for name, rows in usable_rows([root], None).items()
    }
    return model_table(f"{gpu}: ops, models left out; {OPS_TARGET}", scored, report)


def unseen_errors(root: Path, bundle: Bundle) -> Scores:
    """Errors of each family of the bundle on the rows under ``root``, of an unseen GPU."""
    scores = {}
    for name, rows in usable_rows([root], None).items():
        if name in bundle.models:
            priced = bundle.price(name, rows, hardware_of([root], rows))
            scores[name] = errors(priced["predicted_us"].to_numpy(), rows["time_us"].to_numpy())
    return scores


def iteration_errors(results: Sequence[CaseResult]) -> Scores:
    """Errors of iterations by kind of model: DLRM, transformers, convolution networks, others."""
    groups: dict[str, list[CaseResult]] = {kind: [] for kind in (*KINDS, OTHERS)}
    for result in results:
        kinds = (kind for kind, starts in KINDS.items() if result.case.startswith(starts))
        groups[next(kinds, OTHERS)].append(result)
    return {f"{kind} ({len(group)})": summary(group) for kind, group in groups.items() if group}


def error_table(title: str, scored: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of errors in % by name: absolute errors, bias (signed mean), retest; "-": unknown."""
    table = headed(f"{title}, errors in %", "", *COLUMNS, texts=("",))
    for name, scores in scored.items():
        table.add_row(name, *(one_decimal(scores.get(key)) for key in COLUMNS.values()))
    return table
