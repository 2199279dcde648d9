"""How well models trained on one GPU's own rows forecast it: tables of what was measured, errors.

Op families are scored on shapes left out of training, iterations as a whole (no model is trained on
them), and a second GPU by models that never saw a row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from eval.results import CaseResult
from learners.bundle import Bundle
from learners.features.table import ordinary
from learners.train import errors, hardware_of, usable_rows
from microbench.ops import families
from microbench.store import read_hardware, read_rows

# What is aimed at: the median error of a family, geometric mean errors of iterations.
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
Scored = tuple[str, Mapping[str, float], str]  # what, its errors in %, the target in words


def measured_table(root: Path, gpu: str) -> Table:
    """Rows of each family by status, and the most frequent reason of those that failed.

    Products repeated for seconds (``load``) are not counted: no model is trained on them.
    """
    table = Table(title=f"rows of {gpu}")
    for head in ("family", "rows", "ok", "failed", "most frequent reason"):
        table.add_column(head, justify="right" if head in ("rows", "ok", "failed") else "left")
    for name in (*families(), "iteration"):
        rows = read_rows([root], name)
        rows = ordinary(rows[rows["gpu"] == gpu]) if len(rows) else rows
        if not len(rows):
            continue
        failed = rows[rows["status"] != "ok"]
        reason = failed["reason"].mode().iloc[0][:60] if len(failed) else ""
        table.add_row(name, str(len(rows)), str(len(rows) - len(failed)), str(len(failed)), reason)
    return table


def only_gpu(root: Path, gpu: str, folder: Path) -> Path:
    """A dataset root of links to the rows of one GPU."""
    for found in sorted(root.glob(f"*/{gpu}")):
        link = folder / found.parent.name / gpu
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(found.resolve())
    if not folder.is_dir():
        known = sorted({p.name for p in root.glob("*/*") if p.is_dir() and p.parent.name[0] != "."})
        raise ValueError(f"gpu {gpu!r}: no rows under {root}; there are rows of {known}")
    return folder


def family_errors(report: Mapping[str, Any]) -> Iterator[Scored]:
    """Errors of each family on shapes held out of its training, and its noise floor."""
    for name, entry in report.items():
        scores = dict(entry["learners"]["xgboost"])
        if entry["retest_ape_pct"] is not None:
            scores["retest_ape_pct"] = entry["retest_ape_pct"]
        yield name, scores, f"median <= {OPS_MEDIAN_PCT:g}"


def with_hardware(bundle: Bundle, root: Path) -> Bundle:
    """The bundle, and what the cards under ``root`` say of GPUs that it was not trained on."""
    return Bundle(
        models=bundle.models, gpus={**read_hardware([root]), **bundle.gpus}, anchors=bundle.anchors
    )


def unseen_errors(root: Path, bundle: Bundle) -> Iterator[Scored]:
    """Errors of each family of the bundle on the rows of a GPU that it was not trained on."""
    for name, rows in usable_rows([root], None).items():
        if name in bundle.models:
            priced = bundle.price(name, rows, hardware_of([root], rows))
            scores = errors(priced["predicted_us"].to_numpy(), rows["time_us"].to_numpy())
            yield name, scores, ""


def iteration_errors(results: Sequence[CaseResult]) -> Iterator[Scored]:
    """Errors of measured iterations by kind of model; nothing where none was measured."""
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
    """Absolute errors in %, the signed mean (bias), the noise floor and the target beside them."""
    table = Table(title=f"{title}, errors in %")
    table.add_column("")
    for head in (*COLUMNS, "target"):
        table.add_column(head, justify="right")
    for name, scores, target in scored:
        values = [scores.get(key, float("nan")) for key in COLUMNS.values()]
        table.add_row(name, *("-" if np.isnan(v) else f"{v:.1f}" for v in values), target)
    return table
