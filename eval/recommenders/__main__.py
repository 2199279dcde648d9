"""``python -m eval.recommenders``: judges forecasts of recommendation models on this CPU.

Sweeps what they run, trains, then prints errors of lookups on held-out shapes, of 20 random DLRM
iterations, and how well shardings are chosen in 20 random heavy tasks, all under two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from compose.sharding.costs import Costs
from compose.sharding.forecast import forecast_sharding
from compose.sharding.propose import random_sharding
from compose.target import find_target
from eval.progress import progress_bar
from eval.recommenders.judge import (
    Choice,
    Judged,
    choices,
    error_statistics,
    judge_choices,
    judge_iterations,
)
from eval.recommenders.plot import save_scatter
from eval.recommenders.tasks import heavy_task
from eval.speed import run_or_say
from learners.bundle import Bundle
from learners.train import train
from microbench.sweep.collect import collect

FAMILIES = (
    *("embedding_bag", "index", "elementwise", "gemm", "reduction", "optimizer", "host"),
    *("collective", "random"),
)
SHOWN = ("geomean_ape_pct", "median_ape_pct", "mape_pct", "p90_ape_pct", "bias_pct")
RANKS = 2
Found = TypeVar("Found")
SPEED_TABLES, SPEED_SHARDINGS = 64, 1000


def main() -> None:
    """Run all parts; sweeps and bundles that are there already are used again."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.recommenders", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/dlrm"), help="folder to work in")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of sweep")
    parser.add_argument("--count", type=int, default=20, help="configurations and tasks")
    parser.add_argument("--ranks", type=int, default=RANKS, help="processes")
    asked = parser.parse_args()
    run_or_say(lambda: run(asked.out, asked.budget, asked.count, asked.ranks))


def run(out: Path, budget_s: float, count: int, ranks: int) -> None:
    """Sweep, train, forecast, measure and print."""
    console, bundle, begin = Console(width=110), out / "bundle", time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("sweep", total=1.0)
        rows = collect(
            out / "datasets",
            "cpu",
            FAMILIES,
            budget_s,
            progress=lambda n, frac: bar.update(task, completed=frac, description=f"sweep {n}"),
        )
    if rows or not (bundle / "bundle.json").is_file():
        train([out / "datasets"], bundle, None)
    console.print(lookups_table(Bundle.load(bundle)))
    threads = max(1, (os.cpu_count() or 1) // ranks)
    where = (ranks, threads, bundle)
    measured = partial(judge_iterations, count, *where, out / "iterations", 1)
    iterations = _with_bar("measure iterations", measured)
    console.print(iterations_table(iterations))
    measured_tasks = partial(judge_choices, count, *where, out / "choices", 2)
    tasks = _with_bar("measure shardings", measured_tasks)
    console.print(choices_table(choices(tasks, ranks, bundle)))
    every = [j for some in tasks for j in some]
    console.print(errors_line("iterations of all proposed shardings", every))
    console.print(speed_line(bundle))
    (out / "results.json").write_text(json.dumps(plain(iterations, tasks)))
    groups = [("random configurations", iterations), ("shardings of heavy tasks", every)]
    save_scatter(out / "scatter.png", groups)
    console.print(
        f"{(time.monotonic() - begin) / 60:.1f} minutes; results.json, scatter.png: {out}"
    )


def _with_bar(name: str, work: Callable[[Callable[[int], None]], Found]) -> Found:
    """Run ``work`` with a progress bar; it calls its argument with the number of measurements."""
    with progress_bar() as bar:
        task = bar.add_task(name, total=None)
        return work(lambda n: bar.update(task, completed=n, description=f"{name}: {n}"))


def lookups_table(bundle: Bundle) -> Table:
    """Errors of lookups and their gradients on shapes that training did not see."""
    table = Table("family", "rows", *SHOWN, "retest_ape_pct", title="held-out shapes, error in %")
    for name in ("embedding_bag", "index", "collective"):
        if name in bundle.models:
            facts = bundle.models[name].facts
            shown = [f"{facts['errors'].get(e, np.nan):.1f}" for e in (*SHOWN, "retest_ape_pct")]
            table.add_row(name, str(facts["rows"]), *shown)
    return table


def iterations_table(judged: Sequence[Judged]) -> Table:
    """Forecast beside measured iterations."""
    table = Table("tables", "batch", "forecast ms", "measured ms", "error %", "retest %")
    for j in judged:
        model, retest = j.candidate.model, 100 * abs(j.rounds_us[-1] / j.rounds_us[0] - 1)
        times = (f"{us / 1e3:.1f}" for us in (j.forecast_us, j.measured_us))
        error = 100 * (j.forecast_us / j.measured_us - 1)
        sizes = (str(len(model.tables)), str(model.batch))
        table.add_row(*sizes, *times, f"{error:+.1f}", f"{retest:.1f}")
    table.caption = errors_line("DLRM iterations", judged)
    return table


def errors_line(name: str, judged: Sequence[Judged]) -> str:
    """Error statistics in one line."""
    found = error_statistics(judged)
    shown = ", ".join(
        f"{k.removesuffix('_pct')} {found[k]:.1f}" for k in (*SHOWN, "retest_ape_pct")
    )
    return f"{name}: {shown} % ({len(judged)})"


def choices_table(found: Sequence[Choice]) -> Table:
    """Successes by the published criterion, fastest chosen, and regrets."""
    names = ("within 10 %", "fastest", "mean regret %", "worst regret %")
    table = Table("chosen by", *names, title="choice among 8 proposals per task")
    for c in found:
        regrets = [f"{100 * x:.1f}" for x in (np.mean(c.regrets), np.max(c.regrets))]
        counts = [f"{n} of {len(c.regrets)}" for n in (c.successes, c.fastest)]
        table.add_row(c.name, *counts, *regrets)
    return table


def speed_line(bundle: Path) -> str:
    """Say in a line how long forecasts of shardings of many tables take, once ops are priced."""
    rng = np.random.default_rng(0)
    model = heavy_task(rng)
    while len(model.tables) < SPEED_TABLES:
        model = heavy_task(rng)
    costs = Costs(model, find_target("cpu", f"dp={RANKS}", bundle), RANKS)
    forecast_sharding(random_sharding(rng, model, RANKS), costs)
    start = time.perf_counter()
    for _ in range(SPEED_SHARDINGS):
        forecast_sharding(random_sharding(rng, model, RANKS), costs)
    seconds = time.perf_counter() - start
    return (
        f"{len(model.tables)} tables: {1e3 * seconds / SPEED_SHARDINGS:.1f} ms a sharding, "
        f"{SPEED_SHARDINGS} in {seconds:.1f} s"
    )


def plain(
    iterations: Sequence[Judged], tasks: Sequence[Sequence[Judged]]
) -> dict[str, list[dict[str, object]]]:
    """Forecasts and rounds as plain values."""

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
        "choices": [one(j, i) for i, some in enumerate(tasks) for j in some],
    }


if __name__ == "__main__":
    main()
