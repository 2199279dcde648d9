"""What it adds to measure a model's own ops: `python -m itercast.extras.benchmarks.own_ops`.

Steps that `make others` measured on this CPU are forecast twice: by the bundle of a sweep, and by
the same bundle calibrated with rows of the ops that these steps call, which are measured now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from itercast.capture.base.durations import seconds
from itercast.eval.compare import compare_all, measured_rows, measured_steps
from itercast.eval.progress import progress_bar
from itercast.eval.results import CaseResult, in_words
from itercast.eval.tables import headed, output, print_tables
from itercast.extras.calibration.few_rows import calibrate_bundle
from itercast.extras.programs import run_program
from itercast.learners.known_bundles import find_bundle
from itercast.learners.score_file import read_few
from itercast.learners.training_rows import with_mean_times
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.collect import measure_points
from itercast.options import Bundle


def by_own_ops(
    measured: Path, bundle: Path | None, out: Path, budget_s: float
) -> tuple[list[CaseResult], list[CaseResult]]:
    """Forecasts of measured steps by a bundle, and by it with the steps' own ops measured.

    ``out`` gets the points, their rows and the calibrated bundle; measuring takes ``budget_s``.
    """
    rows = measured_rows(measured, None)
    folder, swept = find_bundle("cpu", bundle)
    by_sweep = compare_all(rows, folder)
    (first,) = measured_steps(rows[:1], folder)
    points = out / "points.json"
    write_points(points, first.target.book.asked())  # by all steps, as one book has their prices
    with progress_bar() as bar:
        task = bar.add_task("measure", total=1.0)
        measure_points(out, "cpu", points, budget_s, 0, lambda _, f: bar.update(task, completed=f))
    calibrate_bundle(swept, with_mean_times(read_few([out]))).save(out / "bundle")
    return by_sweep, compare_all(rows, out / "bundle")


def print_both(by_sweep: Sequence[CaseResult], by_own: Sequence[CaseResult]) -> None:
    """Print errors by case, and their statistics, before and after."""
    table = headed(
        "errors of forecasts, %", "case", "by the sweep", "own ops measured", texts=("case",)
    )
    for before, after in zip(by_sweep, by_own, strict=True):
        table.add_row(before.label, f"{before.error_pct:+.1f}", f"{after.error_pct:+.1f}")
    print_tables(table)
    for name, results in (("by the sweep", by_sweep), ("own ops measured", by_own)):
        output().print(f"{name}: {in_words(results)}", highlight=False)


def main(
    measured: Annotated[Path, typer.Argument(help="dataset root of measured steps")] = Path(
        "runs/measured"
    ),
    bundle: Bundle = None,
    budget: Annotated[str, typer.Option(help="time to measure ops: 90s, 2m")] = "2m",
) -> None:
    """Print how well steps are forecast without and with rows of their own ops."""
    with TemporaryDirectory() as folder:
        print_both(*by_own_ops(measured, bundle, Path(folder), seconds(budget)))


if __name__ == "__main__":
    run_program(main)
