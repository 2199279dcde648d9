"""Judges forecasts of recommendation models on this CPU: `python -m itercast.extras.recommenders`.

Sweeps what they run, trains, then prints errors of ops on held-out shapes, of random DLRM
iterations, and how well shardings are chosen for unequal tables, under several numbers of
processes. A page has every measured iteration beside its forecast.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from itercast.eval.progress import rows_bar
from itercast.extras.benchmarks.gpu_report import error_table
from itercast.extras.programs import run_program
from itercast.extras.recommenders.choices import RANKS, judge_tasks, processes, with_bar
from itercast.extras.recommenders.judge import Bench, Judged, error_statistics, judge_iterations
from itercast.extras.recommenders.page import write_page
from itercast.extras.recommenders.points import dense_points, lookup_points, message_points
from itercast.learners.bundle import Bundle
from itercast.learners.train import train
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.collect import collect


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
    out.mkdir(parents=True, exist_ok=True)
    write_points(out / "points.json", {**lookup_points(), **dense_points(), **message_points()})
    wanted = out / "points.json"
    with rows_bar("sweep") as show:
        rows = collect(out / "datasets", "cpu", None, budget, progress=show, wanted=wanted)
    if rows or not (bundle / "bundle.json").is_file():
        train([out / "datasets"], bundle)
    first = Bench(ranks=ranks[0], bundle=bundle, out=out)
    iterations = with_bar("measure iterations", partial(judge_iterations, first, count))
    judged = {f"iterations, {processes(ranks[0])}": iterations}
    for n in ranks:
        tasks = judge_tasks(console, replace(first, ranks=n), count)
        judged[f"proposed shardings, {processes(n)}"] = [j for some in tasks for j in some]
    console.print(error_table("shapes held out, and iterations", scores(bundle, judged)))
    page = write_page(out, judged)
    console.print(f"{(time.monotonic() - begin) / 60:.1f} minutes; every iteration: {page}")


def scores(bundle: Path, judged: Mapping[str, Sequence[Judged]]) -> dict[str, Mapping[str, float]]:
    """Errors of families on held-out shapes, and of iterations; how many are in brackets."""
    models = Bundle.load(bundle).models
    families = {f"{n} ({m.facts['rows']} rows)": m.facts["errors"] for n, m in models.items()}
    return families | {f"{n} ({len(some)})": error_statistics(some) for n, some in judged.items()}


if __name__ == "__main__":
    run_program(main)
