"""Compares forecast with measured peak memory: `python -m itercast.extras.benchmarks.peaks ROOT`.

ROOT holds measured iterations of GPUs, with what torch's allocator had handed out at most.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.table import Table

from itercast.capture.opcall import StepCapture
from itercast.compose.graph.lifetimes import last_uses
from itercast.compose.target import find_target, forecast_step
from itercast.eval.compare import measured_rows, step_of
from itercast.eval.progress import progress_bar
from itercast.eval.results import records
from itercast.eval.tables import print_tables
from itercast.extras.programs import run_program
from itercast.microbench.hardware.stack import asked_stack

LEAST_BYTES = (0.0, 10e9)  # peaks of the rows in a line of the table
SHARES = (0.5, 0.8, 0.9, 1.0)


def held_bytes(step: StepCapture) -> int:
    """Bytes of forward's outputs that the loss reads last, and backward does not.

    A forecast frees them; the measured loop held the model's output until the end of the step.
    """
    last_call = last_uses(step.calls)
    size = {t.storage: t.nbytes for c in step.calls if c.phase == "forward" for t in c.outputs}
    return sum(
        nbytes for storage, nbytes in size.items() if step.calls[last_call[storage]].phase == "loss"
    )


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that state a peak, with the forecast one and its error in %."""
    rows = rows[rows["peak_memory_bytes"].notna()]
    forecasts = []
    with progress_bar() as bar:
        for row in bar.track(records(rows), description="forecast"):
            stack = asked_stack(row["stack"])
            target = find_target(str(row["gpu"]), str(row["plan"]), None, stack=stack)
            step = step_of(row, target.plan)
            forecasts.append(forecast_step(step, target).memory_bytes + held_bytes(step))
    errors = 100 * (np.array(forecasts) / rows["peak_memory_bytes"] - 1)
    return rows.assign(forecast_bytes=forecasts, error_pct=errors)


def errors_table(rows: pd.DataFrame) -> Table:
    """Errors by size of the measured peak: bias, and quantiles of absolute errors."""
    shares = [f"{100 * share:.0f} % within" for share in SHARES]
    table = Table("peak of at least", "steps", "bias %", *shares)
    for least in LEAST_BYTES:
        errors = rows["error_pct"][rows["peak_memory_bytes"] >= least]
        within = errors.abs().quantile(list(SHARES))
        cells = [f"{x:.1f}" for x in (errors.mean(), *within)]
        table.add_row(f"{least / 1e9:.0f} GB", str(len(errors)), *cells)
    return table


def main(root: Annotated[Path, typer.Argument(help="folder of measured iterations")]) -> None:
    """Print errors of forecast peak memory, and the rows that are furthest off."""
    rows = compared(measured_rows(root, None))
    print_tables(errors_table(rows))
    worst = Table("case", "batch", "dtype", "gpu", "measured GB", "forecast GB", "error %")
    for row in records(rows.sort_values("error_pct", key=abs, ascending=False).head(10)):
        names = [str(row[name]) for name in ("case", "batch", "dtype", "gpu")]
        sizes = [f"{row[name] / 1e9:.2f}" for name in ("peak_memory_bytes", "forecast_bytes")]
        worst.add_row(*names, *sizes, f"{row['error_pct']:+.1f}")
    print_tables(worst)


if __name__ == "__main__":
    run_program(main)
