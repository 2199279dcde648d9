"""Judges forecasts of recommendation models on this CPU: `python -m itercast.eval.recommenders`.

Sweeps what they run, trains, then prints errors of ops on held-out shapes, of random DLRM
iterations, and how well shardings are chosen in random heavy tasks, under several numbers of
processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from itercast.compose.sharding.propose import random_sharding
from itercast.eval.progress import progress_bar, run_program
from itercast.eval.recommenders.judge import (
    Bench,
    Choice,
    Judged,
    choices,
    correlations,
    error_statistics,
    judge_choices,
    judge_iterations,
)
from itercast.eval.recommenders.plot import save_scatter
from itercast.eval.recommenders.sweep import sweep
from itercast.eval.recommenders.tasks import heavy_task
from itercast.learners.bundle import Bundle
from itercast.learners.train import train
from itercast.microbench.processes.ranks import threads_of

SHOWN = ("geomean_ape_pct", "median_ape_pct", "mape_pct", "p90_ape_pct", "bias_pct")
RANKS = [2, 4]
Found = TypeVar("Found")
SPEED_TABLES, SPEED_SHARDINGS, SPEED_TOGETHER = 64, 1000, 10


def main(
    out: Annotated[Path, typer.Option(help="folder to work in")] = Path("runs/dlrm"),
    budget: Annotated[float, typer.Option(min=1, help="seconds of sweep")] = 210.0,
    count: Annotated[int, typer.Option(min=1, help="configurations and tasks")] = 20,
    ranks: Annotated[
        list[int], typer.Option(min=1, help="processes, repeatable; iterations with the first")
    ] = RANKS,
) -> None:
    """Sweep, train, forecast, measure and print; sweeps and bundles that are there are reused."""
    console, bundle, begin = Console(width=110), out / "bundle", time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("sweep", total=1.0)
        rows = sweep(
            out / "datasets",
            budget,
            ranks,
            lambda n, frac: bar.update(task, completed=frac, description=f"sweep: {n}"),
        )
    if rows or not (bundle / "bundle.json").is_file():
        train([out / "datasets"], bundle)
    console.print(scores_table(Bundle.load(bundle)))
    first = Bench(ranks=ranks[0], bundle=bundle, out=out)
    iterations = _with_bar("measure iterations", partial(judge_iterations, first, count))
    console.print(iterations_table(iterations, ranks[0]))
    benches = {n: replace(first, ranks=n) for n in ranks}
    tasks = {n: _judge_tasks(console, bench, count) for n, bench in benches.items()}
    console.print(speed_line(first))
    (out / "results.json").write_text(json.dumps(plain(iterations, tasks)))
    groups = [("random configurations", iterations)]
    groups += [
        (f"heavy tasks, {n} processes", _flat(tasks_judged)) for n, tasks_judged in tasks.items()
    ]
    save_scatter(out / "scatter.png", groups)
    console.print(
        f"{(time.monotonic() - begin) / 60:.1f} minutes; results.json, scatter.png: {out}"
    )


def _judge_tasks(console: Console, bench: Bench, count: int) -> list[list[Judged]]:
    """Judge the choice of a sharding in ``count`` tasks, and print it."""
    name = f"measure shardings, {bench.ranks} processes"
    judged = _with_bar(name, partial(judge_choices, bench, count))
    console.print(choices_table(choices(judged, bench), bench.ranks))
    forecast, rounds = correlations(judged)
    console.print(
        "correlation of step times within a task: forecast and measured "
        f"{forecast:.2f}, first and last round {rounds:.2f}"
    )
    console.print(errors_line("iterations of all proposed shardings", _flat(judged)))
    return judged


def _flat(tasks: Sequence[Sequence[Judged]]) -> list[Judged]:
    return [j for some in tasks for j in some]


def _with_bar(name: str, work: Callable[[Callable[[int], None]], Found]) -> Found:
    """Run ``work`` with a progress bar; it calls its argument with the number of measurements."""
    with progress_bar() as bar:
        task = bar.add_task(name, total=None)
        return work(lambda n: bar.update(task, completed=n, description=f"{name}: {n}"))


def scores_table(bundle: Bundle) -> Table:
    """Errors of the families' models on shapes and index streams that were held out."""
    names = [name.removesuffix("_pct") for name in SHOWN]
    table = Table("family", "rows", *names, title="held-out shapes, error in %")
    for name, model in bundle.models.items():
        errors_pct = model.facts["errors"]
        shown = [f"{errors_pct.get(which, np.nan):.1f}" for which in SHOWN]
        table.add_row(name, str(model.facts["rows"]), *shown)
    return table


def iterations_table(judged: Sequence[Judged], ranks: int) -> Table:
    """Forecast beside measured iterations."""
    names = ("forecast ms", "measured ms", "error %", "retest %")
    title = f"iterations, {_processes(ranks)}"
    table = Table("tables", "batch", "optimizer", *names, title=title)
    for j in judged:
        retest = 100 * abs(j.rounds_us[-1] / j.rounds_us[0] - 1)
        error = 100 * (j.forecast_us / j.measured_us - 1)
        model, times_ms = j.candidate.model, (j.forecast_us / 1e3, j.measured_us / 1e3)
        sizes = (str(len(model.tables)), str(model.batch), model.optimizer)
        table.add_row(*sizes, *(f"{ms:.1f}" for ms in times_ms), f"{error:+.1f}", f"{retest:.1f}")
    table.caption = errors_line("DLRM iterations", judged)
    return table


def errors_line(name: str, judged: Sequence[Judged]) -> str:
    """Error statistics in one line."""
    errors_pct = error_statistics(judged)
    shown = ", ".join(
        f"{k.removesuffix('_pct')} {errors_pct[k]:.1f}" for k in (*SHOWN, "retest_ape_pct")
    )
    return f"{name}: {shown} % ({len(judged)})"


def _processes(ranks: int) -> str:
    """How many processes share how many cores."""
    cores = threads_of(1)
    shared = f", which share {cores} cores" if ranks > cores else ""
    return f"{ranks} processes{shared}"


def choices_table(methods: Sequence[Choice], ranks: int) -> Table:
    """How often each method's choice was within 10 % of the fastest or fastest, and its regret."""
    names = ("within 10 %", "fastest", "mean regret %", "worst regret %")
    table = Table(
        "chosen by", *names, title=f"choice among 8 proposals per task, {_processes(ranks)}"
    )
    for c in methods:
        regrets = [f"{100 * x:.1f}" for x in (np.mean(c.regrets), np.max(c.regrets))]
        counts = [f"{n} of {len(c.regrets)}" for n in (c.successes, c.fastest)]
        table.add_row(c.name, *counts, *regrets)
    return table


def speed_line(bench: Bench) -> str:
    """Say in a line how long forecasts of shardings of many tables take, once ops are priced."""
    rng = np.random.default_rng(0)
    model = heavy_task(rng)
    while len(model.tables) < SPEED_TABLES:
        model = heavy_task(rng)
    forecaster = bench.forecaster(model)
    forecaster.forecast(random_sharding(rng, model, bench.ranks))
    start = time.perf_counter()
    for _ in range(SPEED_SHARDINGS // SPEED_TOGETHER):
        forecaster.forecasts(
            [random_sharding(rng, model, bench.ranks) for _ in range(SPEED_TOGETHER)]
        )
    seconds = time.perf_counter() - start
    return (
        f"{len(model.tables)} tables: {1e3 * seconds / SPEED_SHARDINGS:.1f} ms a sharding, "
        f"{SPEED_SHARDINGS} in {seconds:.1f} s"
    )


def plain(
    iterations: Sequence[Judged], tasks: Mapping[int, Sequence[Sequence[Judged]]]
) -> dict[str, list[dict[str, object]]]:
    """All forecasts and measured rounds as plain values, for JSON: iterations, then choices."""

    def one(j: Judged, task: int) -> dict[str, object]:
        return {
            "task": task,
            "name": j.candidate.name,
            "tables": len(j.candidate.model.tables),
            "forecast_us": j.forecast_us,
            "rounds_us": list(j.rounds_us),
        }

    return {
        "iterations": [one(j, i) for i, j in enumerate(iterations)],
        **{
            f"choices of {n} processes": [
                one(j, i) for i, some in enumerate(judged_tasks) for j in some
            ]
            for n, judged_tasks in tasks.items()
        },
    }


if __name__ == "__main__":
    run_program(main)
