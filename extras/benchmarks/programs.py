"""Compares forecasts of captured programs with measured times, and with forecasts of plans.

``python -m itercast.extras.benchmarks.programs [ROOT] [--measure]`` runs it. A program is what
torch runs under a plan: DDP, FSDP2, HSDP, DTensor, pipelines, or messages sent by hand (plan
``cdp``: cyclic data parallelism). It is captured from that code; the other forecast rewrites a
captured step as the plan's text says. ROOT holds measured iterations; ``--measure`` measures
``PROGRAMS`` into it, twice, on this CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.table import Table

from itercast.capture.cases.registry import case
from itercast.capture.programs.program import ProgramCapture
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target
from itercast.eval.compare import compare_all, measured_rows
from itercast.eval.results import CaseResult, summary
from itercast.eval.tables import headed, print_tables
from itercast.extras.benchmarks.gpu_report import error_table
from itercast.extras.programs import run_program
from itercast.microbench.iterations.collect import collect_iterations, iteration_of
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.store import Row

TWO = ("dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "dp=2,cdp=1")
STAGES = ("pp=2,micro=4", "pp=2,micro=2,schedule=gpipe")
FOUR = ("dp=4", "dp=4,zero=3", "dp=4,hsdp=2,zero=3", "dp=2,tp=2,zero=3", "pp=4,micro=4")
PROGRAMS = {
    "gpt-m": (*TWO, *STAGES, *FOUR),
    "llama-m": ("dp=2", "dp=2,zero=3", *FOUR[2:]),
    "vit-m": ("dp=2", "tp=2", "pp=2,micro=4"),
    "resnet-m": ("dp=2", "dp=2,zero=3"),
    "mlp-m": ("dp=2", "dp=4"),
}
DISTURBED_PCT = 30.0  # no assumption: two measurements that differ more say little


def captured(iteration: Iteration) -> ProgramCapture:
    """What an iteration's ranks launch under its plan, captured by running torch's DDP, FSDP2..."""
    from itercast.capture.programs.capture import capture_program
    from itercast.extras.measured_plans.steps import make_plan_step  # needs torch
    from itercast.microbench.processes.ranks import join_process_group

    sizes = (iteration.batch, iteration.seq)

    def program() -> Callable[[], None]:
        join_process_group("cpu")
        chosen, settings = case(iteration.case), iteration.settings()
        return make_plan_step(
            chosen, iteration.plan, *sizes, settings, "cpu", lambda phase: None
        ).run

    return capture_program(program, iteration.ranks)


def as_program(plan: CaseResult, rows: pd.DataFrame) -> CaseResult:
    """The result of a plan with the forecast replaced: by that of the captured program."""
    row = rows[(rows["case"] == plan.case) & (rows["plan"] == plan.plan)].iloc[0]
    sizes: Row = {name: int(row[name]) for name in ("batch", "seq")}
    program = captured(Iteration(case=plan.case, plan=plan.plan, **sizes))
    priced = forecast_program(program, find_target(str(row["gpu"])))
    return replace(
        plan,
        predicted_us=priced.iteration_us,
        predicted_us_p10=priced.iteration_us_p10,
        predicted_us_p90=priced.iteration_us_p90,
        unmodelled_frac=priced.unmodelled_frac,
    )


def results(root: Path) -> list[tuple[CaseResult, CaseResult]]:
    """Pairs of results, program and plan, of each measured iteration on several ranks.

    DLRMs with sharded tables are left out.
    """
    rows = measured_rows(root, None)
    several_ranks = rows["plan"].str.contains("[dtp]p=")
    rows = rows[several_ranks & ~rows["case"].str.startswith("dlrm-sharded")]
    return [(as_program(plan, rows), plan) for plan in compare_all(rows, None)]


def table_of(pairs: Sequence[tuple[CaseResult, CaseResult]]) -> Table:
    """A table of errors of programs and plans in %, beside retest errors."""
    heads = ("case", "plan", "measured ms", "program", "plan", "retest", "no model")
    title = "programs against the clock, errors in %"
    table = headed(title, *heads, texts=("case", "plan"), box=None)
    for program, plan in pairs:
        errors = (f"{program.error_pct:+.1f}", f"{plan.error_pct:+.1f}", plan.retest_text)
        no_model = f"{100 * program.unmodelled_frac:.1f}"
        table.add_row(plan.case, plan.plan, f"{plan.measured_us / 1e3:.1f}", *errors, no_model)
    return table


def scores(pairs: Sequence[tuple[CaseResult, CaseResult]]) -> dict[str, dict[str, float]]:
    """Errors of programs and of plans: over all iterations, and over those that repeat well."""
    calm = [(p, plan) for p, plan in pairs if (plan.retest_ape_pct or 0.0) <= DISTURBED_PCT]
    parts = {"all": pairs, f"measured twice within {DISTURBED_PCT:.0f} %": calm}
    errors = {}
    for name, part in parts.items():
        if part:
            programs, plans = zip(*part, strict=True)
            errors[f"programs, {name} ({len(part)})"] = summary(programs)
            errors[f"plans, {name} ({len(part)})"] = summary(plans)
    return errors


def main(
    root: Annotated[Path, typer.Argument(help="folder of measured iterations")] = Path("datasets"),
    measure: Annotated[bool, typer.Option("--measure", help="first measure into it")] = False,
) -> None:
    """Forecast programs and plans of measured iterations, and print both errors."""
    if measure:
        wanted = [iteration_of(case(n), plan) for n, plans in PROGRAMS.items() for plan in plans]
        for repeat in (0, 1):
            collect_iterations(root, "cpu", wanted, repeat)
    pairs = results(root)
    print_tables(table_of(pairs), error_table("iterations", scores(pairs)))


if __name__ == "__main__":
    run_program(main)
