"""Forecasts beside measured iterations: which rows, the comparison, its table."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from compose.forecast import Forecast, forecast
from compose.plan import ParallelPlan
from eval.results import CaseResult, summary
from itercast.api import capture_case
from itercast.steps import progress_bar
from itercast.target import find_gpu
from learners.bundle import Bundle
from learners.speed import iteration_at_reference_us
from microbench.cases.registry import case
from microbench.store import read_rows

ASKED = ["gpu", "case", "batch", "seq", "plan", "mode", "loss", "optimizer", "dtype", "attn"]
console = Console()


def measured_rows(root: Path, names: Sequence[str] | None) -> pd.DataFrame:
    """Rows of measured iterations; ValueError where there are none."""
    rows = read_rows([root], "iteration")
    if len(rows):
        rows = rows[rows["status"] == "ok"]
        rows = rows[rows["case"].isin(names)] if names else rows
    if not len(rows):
        raise ValueError(f"measured {str(root)!r}: no measured iteration of these cases there")
    return rows


def compare_all(rows: pd.DataFrame, folder: Path) -> list[CaseResult]:
    """Every measured iteration beside its forecast from op models alone."""
    bundle = Bundle.load(folder)
    groups = list(rows.groupby(ASKED, dropna=False, sort=False))
    results = []
    with progress_bar() as bar:
        for key, group in bar.track(groups, description="forecast"):
            asked = dict(zip(ASKED, key, strict=True))
            results.append(_compare(asked, group, bundle, folder))
    return results


def _compare(
    asked: Mapping[str, Any], rows: pd.DataFrame, bundle: Bundle, folder: Path
) -> CaseResult:
    gpu = find_gpu(asked["gpu"], bundle)
    threads = int(rows["threads"].iloc[0])
    names = ("batch", "seq", "mode", "optimizer", "loss", "dtype", "attn")
    found = forecast(
        capture_case(case(asked["case"]), **{n: asked[n] for n in names}),
        bundle,
        gpu,
        ParallelPlan.parse(asked["plan"]),
        bundle_name=str(folder),
        threads=threads,
        optimizer=asked["optimizer"],
    )
    times = list(_at_reference_us(rows, bundle, found))
    first, last = times[0], times[-1]
    return CaseResult(
        case=asked["case"],
        plan=asked["plan"],
        predicted_us=found.iteration_us,
        predicted_us_p10=found.iteration_us_p10,
        predicted_us_p90=found.iteration_us_p90,
        measured_us=(first * last) ** 0.5,
        raw_us=float(rows["time_us"].mean()),
        retest_ape_pct=100 * abs(last / first - 1),
        by_family_us=dict(found.by_family_us),
        unmodelled_frac=found.unmodelled_frac,
    )


def _at_reference_us(rows: pd.DataFrame, bundle: Bundle, found: Forecast) -> Iterator[float]:
    """Measured times by repeat, at the speed the ops were learned at."""
    sensitivities = {name: model.sensitivity for name, model in bundle.models.items()}
    for _, row in rows.sort_values("repeat").iterrows():
        yield iteration_at_reference_us(
            float(row["time_us"]),
            float(row.get("anchor_us", float("nan"))),
            bundle.anchors.get((str(row["gpu"]), int(row["threads"]))),
            found.by_family_us,
            sensitivities,
        )


def report_comparison(
    out: Path, results: Sequence[CaseResult], rows: pd.DataFrame, fit: dict[str, Any]
) -> None:
    """Table on the console, report and plots under ``out``, all of it in MLflow."""
    from eval.report import write_report
    from eval.tracking import log_evaluation

    console.print(results_table(results))
    machine = {
        "measured on": ", ".join(sorted(set(rows["gpu"]))),
        "stack": ", ".join(sorted(set(rows["stack"]))),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    page = write_report(out, results, fit, machine)
    log_evaluation(results, out)
    console.print(f"report: {page}   MLflow UI: make ui")


def results_table(results: Sequence[CaseResult]) -> Table:
    """Predicted against measured, with the error and the noise floor."""
    table = Table(title="predicted against measured training iterations")
    for head in ("case", "plan", "predicted ms", "measured ms", "error %", "retest %"):
        table.add_column(head, justify="left" if head in ("case", "plan") else "right")
    table.add_column("unmodelled %", justify="right")
    for r in results:
        table.add_row(
            r.case,
            r.plan,
            f"{r.predicted_us / 1e3:.2f}",
            f"{r.measured_us / 1e3:.2f}",
            f"{r.error_pct:+.1f}",
            f"{r.retest_ape_pct:.1f}",
            f"{100 * r.unmodelled_frac:.1f}",
        )
    groups = {"one process": [r for r in results if not r.plan]}
    groups["under a plan"] = [r for r in results if r.plan]
    lines = [_caption(name, group) for name, group in groups.items() if group]
    table.caption = "\n".join(lines)
    return table


def _caption(name: str, results: Sequence[CaseResult]) -> str:
    total = summary(results)
    return (
        f"{name}: geomean {total['geomean_ape_pct']:.1f} %, median {total['median_ape_pct']:.1f} "
        f"%, p90 {total['p90_ape_pct']:.1f} %, worst {total['worst_ape_pct']:.1f} %, "
        f"noise floor {total['noise_floor_pct']:.1f} %"
    )
