"""The command ``itercast fleet``: measures many machines through Ray, by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from itercast.capture.base.durations import counted
from itercast.eval.tables import headed, print_tables

if TYPE_CHECKING:
    from itercast.extras.fleet.chunks import Chunk, Cost, Plain
    from itercast.extras.fleet.plan import FleetPlan


def fleet(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[status] PLAN.yaml", help="plan (YAML); status: what is left of it"
        ),
    ],
    address: Annotated[
        str, typer.Option(help="Ray cluster: auto, its address, or local for this machine alone")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="simulate the plan, print its cost, start nothing")
    ] = False,
) -> None:
    """Measure ops and iterations on many machines through Ray; continues an interrupted run."""
    from itercast.extras.fleet.chunks import deal, simulate
    from itercast.extras.fleet.driver import results, with_ray
    from itercast.extras.fleet.plan import load_plan
    from itercast.extras.roots.urls import Root

    paths = words[1:] if words[0] == "status" else words
    if len(paths) != 1:
        raise ValueError(f"fleet {' '.join(words)!r}: expected [status] PLAN.yaml")
    plan = load_plan(Path(paths[0]))
    if dry_run:
        print_tables(cost_table(simulate(plan, deal(plan, capture=False))))
        return
    if words[0] != "status":  # before the minutes that points may take
        with_ray()
        Root(plan.root).check()
    if plan.points is None:
        typer.echo("models are captured for points, a minute; once for a seed", err=True)
    chunks = deal(plan)
    if words[0] == "status":
        print_tables(status_table(plan, chunks, results(plan)))
        typer.echo(f"its rows are at {plan.root}")
        return
    done = results(plan)
    start(plan, chunks, [chunk for chunk in chunks if chunk.name not in done], address)


def start(plan: FleetPlan, chunks: Sequence[Chunk], left: Sequence[Chunk], address: str) -> None:
    """Measure the chunks that are left, with a progress bar and runs in MLflow."""
    from itercast.commands.shared import say_logged
    from itercast.eval.progress import progress_bar
    from itercast.extras.fleet.driver import run_fleet, write_cards
    from itercast.extras.fleet.runs import FleetRuns, end_killed

    end_killed(plan.root)
    done = len(chunks) - len(left)
    typer.echo(f"{len(left)} of {counted(len(chunks), 'chunk')} left", err=True)
    if not left:
        write_cards(plan.root)
        return
    runs = FleetRuns(plan.name, plan.root, len(chunks), done)
    ended = "KILLED"
    try:
        with progress_bar() as bar:
            task = bar.add_task("fleet", total=len(chunks), completed=done)

            def on_end(chunk: Chunk, result: Plain) -> None:
                runs.log_chunk(chunk.machines, chunk.kind, {"chunk": chunk.name, **result})
                bar.update(task, completed=runs.done, description=f"fleet {runs.rows} rows")
                if result["state"] != "done":
                    bar.console.print(f"{chunk.machines} {chunk.name}: {result.get('reason')}")

            ends = run_fleet(plan, left, address, on_end)
        ended = "FINISHED" if set(ends) <= {"done"} else "FAILED"
    finally:
        runs.end(ended)
    states = ", ".join(f"{counted(n, 'chunk')} {state}" for state, n in ends.items() if n)
    typer.echo(f"{counted(runs.rows, 'new row')} in {plan.root}; {states}")
    say_logged()
    if ended != "FINISHED":
        raise typer.Exit(1)


def cost_table(costs: Sequence[Cost]) -> Table:
    """What a plan would cost, by kind of machines."""
    heads = ("machines", "gpu", "chunks", "minutes", "GPU hours", "price")
    table = headed("simulated; nothing was started", *heads, texts=("machines", "gpu"))
    for cost in costs:
        price = "-" if cost.price is None else f"{cost.price:.2f}"
        minutes, hours = f"{cost.wall_s / 60:.1f}", f"{cost.gpu_hours:.2f}"
        table.add_row(cost.machines, cost.gpu, str(cost.chunks), minutes, hours, price)
    prices = [cost.price for cost in costs if cost.price is not None]
    most_s, gpu_hours = max(c.wall_s for c in costs), sum(c.gpu_hours for c in costs)
    whole = f"{sum(prices):.2f}" if len(prices) == len(costs) else "-"
    counts = str(sum(cost.chunks for cost in costs))
    table.add_row("all", "", counts, f"{most_s / 60:.1f}", f"{gpu_hours:.2f}", whole)
    return table


def status_table(
    plan: FleetPlan, chunks: Sequence[Chunk], done: Mapping[str, Mapping[str, object]]
) -> Table:
    """Chunks that are done and left, rows and machines, by kind of machines."""
    heads = ("machines", "done", "left", "rows", "hosts", "minutes left")
    table = headed(plan.name, *heads, texts=("machines",))
    for kind in plan.machines:
        own_chunks = [c for c in chunks if c.machines == kind.name]
        ended = [done[c.name] for c in own_chunks if c.name in done]
        left = [c for c in own_chunks if c.name not in done]
        rows = sum(int(str(result.get("rows", 0))) for result in ended)
        hosts = Counter(str(result.get("host")) for result in ended)
        minutes = sum(c.seconds for c in left) / 60 / kind.count
        table.add_row(
            kind.name, str(len(ended)), str(len(left)), str(rows), str(len(hosts)), f"{minutes:.1f}"
        )
    return table
