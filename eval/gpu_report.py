"""Tables of ``itercast gpu-report``: errors of models trained on the rows of one GPU.

Op families are scored on held-out shapes and iterations as a whole (no model is trained on them).
A second GPU is forecast by models that were not trained on any row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from itercast.eval.results import CaseResult
from itercast.learners.beyond_memory import usable_rows
from itercast.learners.bundle import Bundle
from itercast.learners.models.compared import BLEND
from itercast.learners.train import errors, hardware_of
from itercast.microbench.ops import families
from itercast.microbench.store import Facts, read_hardware, read_rows

# Targets: the median error of a family, geometric mean errors of iterations.
OPS_MEDIAN_PCT = 4.0
ITERATIONS_GEOMEAN_PCT = {"DLRM": 3.0, "transformers": 2.0}
KINDS: Mapping[str, Callable[[str], bool]] = {
    "DLRM": lambda case: case.startswith("dlrm"),
    "transformers": lambda case: case.startswith(("gpt", "bert", "llama", "vit", "switch")),
    "convolution networks": lambda case: case.startswith(("resnet", "unet")),
}
COLUMNS = {
    "median": "median_ape_pct",
    "mean": "mape_pct",
    "p90": "p90_ape_pct",
    "worst": "worst_ape_pct",
    "bias": "bias_pct",
    "geomean": "geomean_ape_pct",
    "retest": "retest_ape_pct",
}
Scored = tuple[str, Mapping[str, float], str]  # name, errors in %, target as text


def measured_table(root: Path, gpu: str) -> Table:
    """A table of row counts by family and status, with the most frequent reason for a failure."""
    table = Table(title=f"rows of {gpu}")
    for head in ("family", "rows", "ok", "failed", "most frequent reason"):
        table.add_column(head, justify="right" if head in ("rows", "ok", "failed") else "left")
    for name in (*families(), "iteration"):
        rows = read_rows([root], name)
        rows = rows[rows["gpu"] == gpu] if len(rows) else rows
        if not len(rows):
            continue
        failed = rows[rows["status"] != "ok"]
        reason = failed["reason"].mode().iloc[0][:60] if len(failed) else ""
        table.add_row(name, str(len(rows)), str(len(rows) - len(failed)), str(len(failed)), reason)
    return table


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


def family_errors(report: Facts) -> Iterator[Scored]:
    """Errors of each family on held-out shapes, and the retest error of its rows."""
    for name, entry in report.items():
        scores = dict(entry["learners"][BLEND])
        if entry["retest_ape_pct"] is not None:
            scores["retest_ape_pct"] = entry["retest_ape_pct"]
        yield name, scores, f"median <= {OPS_MEDIAN_PCT:g}"


def with_hardware(bundle: Bundle, root: Path) -> Bundle:
    """The bundle plus the hardware facts of the GPUs that have cards under ``root``."""
    return replace(bundle, gpus={**read_hardware([root]), **bundle.gpus})


def unseen_errors(root: Path, bundle: Bundle) -> Iterator[Scored]:
    """Errors of each family of the bundle on the rows under ``root``, of an unseen GPU."""
    for name, rows in usable_rows([root], None).items():
        if name in bundle.models:
            priced = bundle.price(name, rows, hardware_of([root], rows))
            scores = errors(priced["predicted_us"].to_numpy(), rows["time_us"].to_numpy())
            yield name, scores, ""


def iteration_errors(results: Sequence[CaseResult]) -> Iterator[Scored]:
    """Errors of iterations by kind of model: DLRM, transformers, convolution networks, others."""
    rest = [r for r in results if not any(is_kind(r.case) for is_kind in KINDS.values())]
    groups = {kind: [r for r in results if is_kind(r.case)] for kind, is_kind in KINDS.items()}
    for kind, group in {**groups, "other models": rest}.items():
        if group:
            times = np.array([(r.predicted_us, r.measured_us) for r in group])
            scores = errors(times[:, 0], times[:, 1])
            if twice := [r.retest_ape_pct for r in group if r.retest_ape_pct is not None]:
                scores["retest_ape_pct"] = float(np.median(twice))
            target = ITERATIONS_GEOMEAN_PCT.get(kind)
            yield f"{kind} ({len(group)})", scores, f"geomean <= {target:g}" if target else ""


def error_table(title: str, scored: Iterable[Scored]) -> Table:
    """A table of errors in %: absolute errors, bias (signed mean), retest error, and the target."""
    table = Table(title=f"{title}, errors in %")
    table.add_column("")
    for head in (*COLUMNS, "target"):
        table.add_column(head, justify="right")
    for name, scores, target in scored:
        values = [scores.get(key, float("nan")) for key in COLUMNS.values()]
        table.add_row(name, *("-" if np.isnan(v) else f"{v:.1f}" for v in values), target)
    return table
