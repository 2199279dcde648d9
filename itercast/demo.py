"""The main job end to end on this CPU: sweep, train, measure, forecast, compare."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from compose.forecast import forecast
from compose.plan import ParallelPlan
from eval.results import CaseResult, summary
from itercast.api import capture_case, find_gpu
from itercast.steps import fit, progress_bar, report_table, sweep
from learners.bundle import Bundle
from learners.speed import iteration_at_reference_us
from microbench.cases.registry import EvalCase, case, case_names

RUN = Path("runs/demo")
REPETITIONS = 20
console = Console()


def run_demo(budget_s: float) -> None:
    """All stages; each reuses what an earlier run left and says so."""
    data, bundle, fit_file = RUN / "datasets", RUN / "bundle", RUN / "fit.json"
    rows = sweep(data, "cpu", None, budget_s, 0)
    console.print(f"sweep: {rows} new rows" if rows else f"sweep: reusing {data}")
    if rows or not fit_file.is_file() or not (bundle / "bundle.json").is_file():
        report = fit([data], bundle, None, 0)
        fit_file.write_text(json.dumps(report))
    else:
        report = json.loads(fit_file.read_text())
        console.print(f"train: reusing {bundle}")
    console.print(report_table(report))
    evaluate_cases(Path("reports/demo"), bundle, None, report, RUN / "iterations")


def evaluate_cases(
    out: Path,
    bundle_folder: Path,
    names: Sequence[str] | None,
    fit_report: dict[str, Any],
    store_root: Path | None,
) -> None:
    """Measured and predicted iterations of the cases: table, report, MLflow."""
    from eval.report import write_report
    from eval.tracking import log_evaluation

    chosen = [case(n) for n in names or [n for n in case_names() if case(n).measured]]
    measured = measured_cases(chosen, store_root)
    bundle = Bundle.load(bundle_folder)
    results = [compare(c, measured, bundle, bundle_folder) for c in chosen]
    console.print(results_table(results))
    machine = {
        "cpu": find_gpu("cpu", bundle).name,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "date": datetime.date.today().isoformat(),
    }
    page = write_report(out, results, fit_report, machine)
    log_evaluation(results, out)
    console.print(f"report: {page}   MLflow UI: make ui")


def measured_cases(chosen: Sequence[EvalCase], root: Path | None) -> pd.DataFrame:
    """Two rounds of measured iterations, far apart; reused from ``root`` where they are there."""
    path = None if root is None else root / "iterations.parquet"
    if path is not None and path.is_file():
        rows = pd.read_parquet(path)
        if {c.name for c in chosen} <= set(rows["case"]):
            console.print(f"iterations: reusing {path}")
            return rows
    from itercast.measure import measure_round
    from microbench.store import write_atomic

    rounds = []
    with progress_bar() as bar:
        task = bar.add_task("iterations", total=2 * len(chosen))
        for repeat in range(2):
            for row in measure_round(chosen, REPETITIONS):
                rounds.append({**row, "repeat": repeat})
                bar.advance(task)
                bar.update(task, description=f"iterations {row['case']}")
    rows = pd.DataFrame(rounds)
    if path is not None:
        write_atomic(path, rows.to_parquet(None, index=False))
    return rows


def compare(chosen: EvalCase, measured: pd.DataFrame, bundle: Bundle, folder: Path) -> CaseResult:
    """One case: the forecast from op models alone, beside the clock."""
    gpu = find_gpu("cpu", bundle)
    found = forecast(
        capture_case(chosen),
        bundle,
        gpu,
        ParallelPlan(),
        bundle_name=str(folder),
        threads=gpu.sm_count,
        optimizer="adamw",
    )
    mine = measured[measured["case"] == chosen.name].sort_values("repeat")
    first, second = (
        iteration_at_reference_us(
            float(row["time_us"]),
            float(row["anchor_us"]),
            bundle.anchors.get((gpu.name, gpu.sm_count)),
            found.by_family_us,
            {name: model.sensitivity for name, model in bundle.models.items()},
        )
        for _, row in mine.iterrows()
    )
    return CaseResult(
        case=chosen.name,
        plan="",
        predicted_us=found.iteration_us,
        predicted_us_p10=found.iteration_us_p10,
        predicted_us_p90=found.iteration_us_p90,
        measured_us=(first * second) ** 0.5,
        raw_us=float(mine["time_us"].mean()),
        retest_ape_pct=100 * abs(second / first - 1),
        by_family_us=dict(found.by_family_us),
        unmodelled_frac=found.unmodelled_frac,
    )


def results_table(results: Sequence[CaseResult]) -> Table:
    """Predicted against measured, with the error and the noise floor."""
    table = Table(title="predicted against measured training iterations")
    for head in ("case", "predicted ms", "measured ms", "error %", "retest %", "unmodelled %"):
        table.add_column(head, justify="left" if head == "case" else "right")
    for r in results:
        table.add_row(
            r.case,
            f"{r.predicted_us / 1e3:.2f}",
            f"{r.measured_us / 1e3:.2f}",
            f"{r.error_pct:+.1f}",
            f"{r.retest_ape_pct:.1f}",
            f"{100 * r.unmodelled_frac:.1f}",
        )
    total = summary(results)
    table.caption = (
        f"geomean {total['geomean_ape_pct']:.1f} %, median {total['median_ape_pct']:.1f} %, "
        f"p90 {total['p90_ape_pct']:.1f} %, worst {total['worst_ape_pct']:.1f} %, "
        f"noise floor {total['noise_floor_pct']:.1f} %"
    )
    return table
