"""Width of 80 % intervals on a CPU: `python -m itercast.extras.published.fits.widths DATA`.

Each case of this project's own CPU is forecast by the shipped bundle. The half width is the least
that covers 80 % of the measured iterations; cases count alike, however often they were measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from itercast.eval.compare import compare_all, measured_rows
from itercast.extras.programs import run_program
from itercast.learners.bundle import SHIPPED_CPU

NOMINAL = 0.8  # of measured iterations that an interval is to cover
TRIED = np.arange(0.0, 3.0, 0.01)  # half widths in log time


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


def cpu_errors(data: Path) -> pd.Series:
    """log(measured / predicted) of a CPU's iterations; each case counts as a source of its own."""
    found = pd.DataFrame(compare_all(measured_rows(data, None), SHIPPED_CPU))
    errors = np.log((found["measured_us"] / found["predicted_us"]).to_numpy(dtype=float))
    return pd.Series(errors, index=found["case"])


def main(data: Annotated[Path, typer.Argument(help="rows of a CPU")] = Path("datasets")) -> None:
    """Print the half width that covers 80 % of all errors of CPU iterations.

    Then, of each case, the share of its errors inside the half width of all other cases.
    """
    errors = cpu_errors(data)
    covered = by_source(errors)
    print(f"half width {half_width(errors):.2f}; left out:\n{covered.round(2)}")
    print(f"mean of cases {covered['covered_pct'].mean():.0f} %")


if __name__ == "__main__":
    run_program(main)
