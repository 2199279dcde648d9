"""Fits the assumed numbers behind intervals.

`python -m itercast.eval.intervals ops|iterations PUBLIC` runs it.

``ops`` prints how strongly errors of two ops on a GPU left out of training correlate, and how much
wider errors are outside the envelope of the training rows.

``iterations`` forecasts each published source by models that were trained without it, and fits the
error that whole iterations have beyond that of their ops (``itercast.eval.intervals.common_part``).
It prints the fitted half widths, and each source's coverage by those fitted on the other sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.compose.intervals.correlated_errors import ASSUMED
from itercast.eval.intervals import common_part, correlations
from itercast.eval.intervals.iterations import cpu_iterations, public_iterations
from itercast.eval.progress import run_or_say
from itercast.eval.public.left_out_models import TRAINED_ON
from itercast.eval.public.left_out_ops import KNOWN_ROWS, read_ops
from itercast.eval.public.shipped import MAX_ROWS
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU
from itercast.learners.family_model import Prepared, prepare
from itercast.learners.train import hardware_of, subsample_evenly, usable_rows
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families

NOT_BY_GPU = ("collective",)  # families whose rows name a cluster where others name a GPU


def prepared_public(public: Path) -> dict[str, Prepared]:
    """Published rows by family, at most KNOWN_ROWS of each, of the shipped bundle's sources."""
    found = {}
    for name, rows in read_ops(public).items():
        if name in MAX_ROWS and name not in NOT_BY_GPU:
            rows = rows[rows["source"].isin(TRAINED_ON)].reset_index(drop=True)
            rows = subsample_evenly(rows, KNOWN_ROWS).reset_index(drop=True)
            gpus = {str(gpu): load_gpu(str(gpu)) for gpu in rows["gpu"].unique()}
            found[name] = prepare(rows, families()[name], gpus)
    return found


def prepared_cpu(data: Path) -> dict[str, Prepared]:
    """All rows of a CPU's dataset by family, without collectives."""
    tables = {n: t for n, t in usable_rows([data], None).items() if n not in NOT_BY_GPU}
    return {n: prepare(t, families()[n], hardware_of([data], t)) for n, t in tables.items()}


def print_ops(public: Path, data: Path) -> None:
    """Print correlations of op errors, and error widths outside the envelope over those inside."""
    prepared = prepared_public(public)
    gpus = sorted({str(g) for one in prepared.values() for g in one.query.gpus})
    errors = correlations.unseen_errors(prepared, gpus)
    within = correlations.within_families(errors)
    print(f"unseen GPUs, correlation within a family: median {within.median():.2f}")
    print(within.round(2).to_string())
    print(f"between families: {correlations.between_families(errors):.2f}")
    for what, some in (("GPUs", prepared), ("CPU", prepared_cpu(data))):
        widening = pd.Series({n: correlations.widening_outside(one) for n, one in some.items()})
        print(f"outside over inside, {what}: geometric mean {np.exp(np.log(widening).mean()):.1f}")
        print(widening.round(1).to_string())


def print_iterations(public: Path, data: Path, most: int) -> None:
    """Print the common half widths fitted on all sources, and each source's coverage without it.

    ``most``: iterations of each source that a line of the public benchmark may contribute.
    """
    measured: Mapping[str, pd.DataFrame] = {
        "gpu": public_iterations(public, SHIPPED, most),
        "cpu": cpu_iterations(data, SHIPPED_CPU),
    }
    for kind, rows in measured.items():
        table = common_part.half_widths(rows, kind)
        stated = ASSUMED if kind == "cpu" else None  # little of a CPU's iterations is assumed
        found = common_part.fit(table, stated)
        print(f"{kind}: shared {found.shared:.2f}, assumed {found.assumed:.2f}")
        lines = common_part.left_out(table, stated)
        print(lines.round(2).to_string(index=False))
        mean = float(np.average(lines["coverage_pct"], weights=lines["iterations"]))
        print(f"of all {mean:.0f} %, mean of sources {lines['coverage_pct'].mean():.0f} %")


def main() -> None:
    """Run what the command line asks for."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m itercast.eval.intervals", description=about)
    parser.add_argument("what", choices=("ops", "iterations"))
    parser.add_argument("public", type=Path, help="folder of published measurements")
    parser.add_argument("--data", type=Path, default=Path("datasets"), help="rows of a CPU")
    parser.add_argument("--rows", type=int, default=12, help="iterations of a line and source")
    asked = parser.parse_args()
    if asked.what == "ops":
        run_or_say(lambda: print_ops(asked.public, asked.data))
    else:
        run_or_say(lambda: print_iterations(asked.public, asked.data, asked.rows))


if __name__ == "__main__":
    main()
