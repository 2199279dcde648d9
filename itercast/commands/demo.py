"""The main job end to end on this CPU: sweep, train, measure, forecast, compare."""

from __future__ import annotations

import json
from pathlib import Path

from eval.compare import compare_all, console, measured_rows, report_comparison
from itercast.commands.shared import fit, iterations, report_table, sweep

RUN = Path("runs/demo")
TRIALS = 3


def run_demo(budget_s: float) -> None:
    """All stages; each reuses what an earlier run left and says so.

    Sweeps and rounds of iterations take turns: a shared machine drifts, and ops and iterations are
    to see the same of it.
    """
    data, bundle, fit_file = RUN / "datasets", RUN / "bundle", RUN / "fit.json"
    rows = measured = 0
    for repeat in (0, 1):
        rows += sweep(data, "cpu", None, budget_s * (repeat + 1) / 2, 0)
        measured += iterations(data, "cpu", (repeat,))
    console.print(f"sweep: {rows} new rows" if rows else f"sweep: reusing {data}")
    console.print(f"iterations: {measured} new rows" if measured else f"iterations: reusing {data}")
    if rows or not fit_file.is_file() or not (bundle / "bundle.json").is_file():
        report = fit([data], bundle, None, TRIALS)
        fit_file.write_text(json.dumps(report))
    else:
        report = json.loads(fit_file.read_text())
        console.print(f"train: reusing {bundle}")
    console.print(report_table(report))
    found = measured_rows(data, None)
    report_comparison(Path("reports/demo"), compare_all(found, bundle), found, report)
