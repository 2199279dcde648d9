"""The command ``itercast demo``: sweep this CPU, train, measure, forecast and compare."""

from __future__ import annotations

import json
from pathlib import Path

from itercast.commands.shared import ROUNDS, fit, iterations, log_training, report_table, sweep
from itercast.errors import when_stopped
from itercast.eval.compare import compare_all, measured_rows
from itercast.eval.evaluation import report_comparison
from itercast.eval.tables import output, print_tables
from itercast.eval.tracking.store import now_ms
from itercast.learners.held_out import has_held_out

RUN = Path("runs/demo")
TRIALS = 3
PARTS = [ROUNDS[first : first + 3] for first in range(0, len(ROUNDS), 3)]


def run_demo(budget_s: float) -> None:
    """Run all stages; each prints when it reuses the results of an earlier run.

    ``budget_s``: seconds of sweeps in all; a sweep's budget includes what earlier ones spent.
    Sweeps and rounds of iterations alternate: the speed of a shared machine drifts, and ops and
    iterations should be measured at the same mix of speeds.
    """
    data, bundle, fit_file = RUN / "datasets", RUN / "bundle", RUN / "fit.json"
    rows = measured = 0
    with when_stopped(f"what was measured is in {data}; `itercast demo` goes on"):
        for number, rounds in enumerate(PARTS, 1):
            rows += sweep(data, "cpu", None, budget_s * number / len(PARTS), 0)
            measured += iterations(data, "cpu", rounds=rounds)
    output().print(f"sweep: {rows} new rows" if rows else f"sweep: reusing {data}")
    output().print(
        f"iterations: {measured} new rows" if measured else f"iterations: reusing {data}"
    )
    trained = rows or not fit_file.is_file() or not has_held_out(bundle)
    if trained:
        report = fit([data], bundle, None, TRIALS)
        fit_file.write_text(json.dumps(report))
    else:
        report = json.loads(fit_file.read_text())
        output().print(f"train: reusing {bundle}")
    print_tables(report_table(report))
    iteration_rows = measured_rows(data, None)
    begin_ms = now_ms()
    results = compare_all(iteration_rows, bundle)
    compared = (results, iteration_rows, report, data, bundle)
    report_comparison(Path("reports/demo"), *compared, source="itercast demo", begin_ms=begin_ms)
    if trained:
        log_training(report, bundle, [data])
