"""Judges choices of shardings by real processes: `python -m itercast.extras.recommenders.choices`.

Tasks are models of unequal tables, with seven shardings each, which gloo processes on this CPU run
in turn. A choice succeeds if its measured time is within 10 % of the fastest. itercast's choices
are compared with those of torchrec's formulas, of a random pick, and of measuring once. Tasks whose
candidates are less than 30 % apart are left out: they cannot tell ways of choosing apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from itercast.eval.progress import progress_bar
from itercast.extras.programs import run_program
from itercast.extras.recommenders.judge import (
    Bench,
    Choice,
    Judged,
    apart,
    choices,
    correlations,
    judge_choices,
)
from itercast.learners.known_bundles import find_bundle
from itercast.microbench.processes.ranks import threads_of

RANKS = [2, 4]
Found = TypeVar("Found")


def main(
    bundle: Annotated[Path | None, typer.Option(help="by default that of this CPU")] = None,
    out: Annotated[Path, typer.Option(help="folder to work in")] = Path("runs/choices"),
    tasks: Annotated[int, typer.Option(min=1, help="models of unequal tables")] = 20,
    ranks: Annotated[list[int], typer.Option(min=2, help="processes, repeatable")] = RANKS,
) -> None:
    """Forecast and measure the shardings of random tasks, and print how well each way chooses."""
    folder, _ = find_bundle("cpu", bundle)
    for n in ranks:
        judge_tasks(Console(width=110), Bench(ranks=n, bundle=folder, out=out), tasks)


def judge_tasks(console: Console, bench: Bench, count: int) -> list[list[Judged]]:
    """Judge the choice of a sharding in ``count`` tasks, and print it."""
    name = f"measure shardings, {bench.ranks} processes"
    judged = with_bar(name, partial(judge_choices, bench, count))
    told = apart(judged)
    if told:
        console.print(choices_table(choices(told, bench), bench.ranks))
    console.print(f"{len(told)} of {len(judged)} tasks have candidates 30 % apart or more")
    forecast, rounds = correlations(judged)
    console.print(
        "correlation of step times within a task: forecast and measured "
        f"{forecast:.2f}, first and last round {rounds:.2f}"
    )
    return judged


def with_bar(name: str, work: Callable[[Callable[[int], None]], Found]) -> Found:
    """Run ``work`` with a progress bar; it calls its argument with the number of measurements."""
    with progress_bar() as bar:
        task = bar.add_task(name, total=None)
        return work(lambda n: bar.update(task, completed=n, description=f"{name}: {n}"))


def processes(ranks: int) -> str:
    """How many processes share how many cores."""
    cores = threads_of(1)
    shared = f", which share {cores} cores" if ranks > cores else ""
    return f"{ranks} processes{shared}"


def choices_table(methods: Sequence[Choice], ranks: int) -> Table:
    """How often each method's choice was within 10 % of the fastest or fastest, and its regret."""
    names = ("within 10 %", "fastest", "mean regret %", "worst regret %")
    table = Table(
        "chosen by", *names, title=f"choice among 7 proposals per task, {processes(ranks)}"
    )
    for c in methods:
        regrets = [f"{100 * x:.1f}" for x in (np.mean(c.means), max(map(max, c.regrets)))]
        counts = [f"{n:.3g} of {len(c.regrets)}" for n in (c.successes, c.fastest)]
        table.add_row(c.name, *counts, *regrets)
    return table


if __name__ == "__main__":
    run_program(main)
