"""Fits the width of 80 % intervals: `python -m itercast.extras.published.fits.widths PUBLIC`.

Each published source is forecast by models and numbers that were made without it, each case of this
project's own CPU by the shipped bundle. The half width of a kind of device is the smallest that
covers 80 % of the measured iterations; sources count alike, however much they measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from itercast.eval.compare import compare_all, measured_rows
from itercast.eval.progress import run_program
from itercast.extras.published.left_out_models import forecasts_without, sampled
from itercast.extras.published.models import MEASURED, read_lines
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU
from itercast.microbench.importers.base import positive

NOMINAL = 0.8  # of measured iterations that an interval is to cover
TRIED = np.arange(0.0, 3.0, 0.01)  # half widths in log time
ONE_ROW = ["source", "gpu", "case", "batch", "plan", "time_us"]  # may be in several lines


def half_width(errors: pd.Series) -> float:
    """The smallest half width that covers NOMINAL of the log errors, whose index names sources."""
    return float(next((h for h in TRIED if coverage(errors, h) >= NOMINAL), TRIED[-1]))


def coverage(errors: pd.Series, half: float) -> float:
    """Mean over sources of the share of their errors within a half width."""
    return float((errors.abs() <= half).groupby(level=0).mean().mean())


def by_source(errors: pd.Series) -> pd.DataFrame:
    """Iterations of each source, and the share in % within the half width of the other sources."""
    lines = {}
    for source in sorted(errors.index.unique()):
        half = half_width(errors[errors.index != source])
        own = errors[errors.index == source]
        lines[source] = {
            "iterations": len(own),
            "half_width": half,
            "covered_pct": 100 * coverage(own, half),
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def log_errors(source: pd.Series, measured: pd.Series, predicted: pd.Series) -> pd.Series:
    """log(measured / predicted), named after the sources."""
    return pd.Series(np.log((measured / predicted).to_numpy(dtype=float)), index=source)


def public_errors(public: Path, most: int) -> pd.Series:
    """Log errors of published steps, ``most`` of each source and line, without their source.

    Lines that calibrate forecasts or hosts on their own rows are left out.
    """
    lines = [
        (line, rows[positive(rows[MEASURED["step"]]) > 0])
        for line, rows in read_lines(public, "")
        if line.part == "step" and not (line.calibrated or line.fits_hosts)
    ]
    parts = []
    for source in sorted({str(s) for _, rows in lines for s in rows["source"].unique()}):
        own = [(x, rows[rows["source"] == source].reset_index(drop=True)) for x, rows in lines]
        some = [(x, sampled(x, rows, most)) for x, rows in own if len(rows)]
        parts += [rows for _, rows in forecasts_without(source, some, public, SHIPPED)]
    found = pd.concat(parts, ignore_index=True).drop_duplicates(ONE_ROW)
    return log_errors(found["source"], found["time_us"], found["step"])


def cpu_errors(data: Path) -> pd.Series:
    """Log errors of a CPU's measured iterations; each case counts as a source of its own."""
    found = pd.DataFrame(compare_all(measured_rows(data, None), SHIPPED_CPU))
    return log_errors(found["case"], found["measured_us"], found["predicted_us"])


def main(
    public: Annotated[Path, typer.Argument(help="folder of published measurements")],
    data: Annotated[Path, typer.Option(help="rows of a CPU")] = Path("datasets"),
    rows: Annotated[int, typer.Option(help="iterations of a line and source")] = 12,
) -> None:
    """Print the half width of each kind of device, and how much of each source it covers."""
    for kind, errors in {"cpu": cpu_errors(data), "gpu": public_errors(public, rows)}.items():
        covered = by_source(errors)
        print(f"{kind}: half width {half_width(errors):.2f}; left out:\n{covered.round(2)}")
        print(f"mean of sources {covered['covered_pct'].mean():.0f} %")


if __name__ == "__main__":
    run_program(main)
