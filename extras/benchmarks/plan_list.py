"""Measures parallel plans and further optimizers on the CPU.

`python -m itercast.extras.benchmarks.plan_list ROOT --ranks 2` runs it.

Where a plan has more ranks than the CPU has cores, ranks share cores.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.cases.registry import case
from itercast.extras.programs import run_program
from itercast.microbench.iterations.collect import collect_iterations, iteration_of
from itercast.microbench.iterations.measure import Iteration

LISTED = facts_of(__file__)


def wanted(ranks: int) -> list[Iteration]:
    """Iterations under the listed plans and optimizers with this number of ranks."""
    listed = [
        iteration_of(case(name), plan) for name, plans in LISTED["plans"].items() for plan in plans
    ]
    for optimizer, names in LISTED["optimizers"].items():
        listed += [replace(iteration_of(case(name)), optimizer=optimizer) for name in names]
    return [iteration for iteration in listed if iteration.ranks == ranks]


def main(
    root: Path,
    repeat: Annotated[
        int, typer.Option(help="0 for the first measurement, 1 for a second one")
    ] = 0,
    ranks: Annotated[int, typer.Option(help="processes of the plans: 1, 2 or 4")] = 2,
    case_name: Annotated[str, typer.Option("--case", help="measure this case only")] = "",
) -> None:
    """Measure the plans with this number of ranks, except those that have rows already."""
    chosen = [iteration for iteration in wanted(ranks) if case_name in ("", iteration.case)]
    if not chosen:
        raise typer.BadParameter(
            f"ranks {ranks}, case {case_name!r}: plan_list.yaml has no such plan"
        )
    rows = collect_iterations(root, "cpu", chosen, repeat)
    logging.getLogger(__name__).info("%d rows", rows)


if __name__ == "__main__":
    run_program(main)
