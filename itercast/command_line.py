"""The command line ``itercast COMMAND``; ``itercast --help`` lists the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from itercast.capture.base.durations import seconds
from itercast.capture.base.extensions import function_of, with_added
from itercast.commands.plan import plan
from itercast.commands.predict import predict
from itercast.commands.run import run
from itercast.errors import OneLineGroup, when_stopped
from itercast.eval.tables import print_tables
from itercast.names import KINDS, kinds, listing
from itercast.options import Bundle, Families, Json, fetched_root, prints_aside
from itercast.outputs import folder_to_write

app = typer.Typer(
    cls=OneLineGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # a paragraph's lines are one
    help="Forecast how long a training iteration takes.",
)


def print_version(wanted: bool) -> None:
    """Print the version of the installed package and exit, if asked to."""
    if wanted:
        typer.echo(f"itercast {version('itercast')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Forecast how long a training iteration takes."""


def collect(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    family: Families = None,
    budget: Annotated[
        str, typer.Option(help="time for this dataset root, earlier runs included: 90s, 10m, 1h")
    ] = "5m",
    out: Annotated[str, folder_to_write("dataset root: a folder or a URL")] = "datasets",
    seed: Annotated[int, typer.Option(help="seed of the order of points")] = 0,
    torchrun: Annotated[
        str,
        typer.Option(
            help="arguments of torchrun, to measure collectives over nodes; the same on each "
            'node, e.g. "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"'
        ),
    ] = "",
    points: Annotated[
        Path | None, typer.Option(help="measure only the points of this file (JSON)")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="GPUs of this node to use, one worker each: all, or a number")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Measure ops on this machine into a dataset; continues an interrupted sweep."""
    from itercast.commands.shared import sweep
    from itercast.microbench.processes.lanes import gpu_count

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: allowed are cpu and cuda")
    gpus = gpu_count(devices, device)
    kept = f"what was measured is in {out}; the same command goes on"
    with when_stopped(kept), function_of("roots", "written")(out) as root:
        rows = sweep(root, device, family, seconds(budget), seed, torchrun, points, gpus)
    typer.echo(json.dumps({"rows": rows, "out": out}) if as_json else f"{rows} new rows in {out}")


Memory = Annotated[
    str | None,
    typer.Option(
        help="memory of a family's training, such as 4GiB: of more rows as many as fit are drawn "
        "evenly; default: half of the machine's"
    ),
]


def train(
    out: Annotated[Path | None, folder_to_write("bundle to write")] = None,
    into: Annotated[
        Path | None, typer.Option(help="bundle to change: adds the families, or replaces them")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="dataset root, a folder or a URL; repeatable")
    ] = None,
    family: Families = None,
    trials: Annotated[int, typer.Option(min=0, help="trials per family; 0: default options")] = 0,
    storage: Annotated[
        str | None, typer.Option(help="database URL of the trials, to share them among machines")
    ] = None,
    memory: Memory = None,
    address: Annotated[
        str | None, typer.Option(help="train families as Ray tasks: auto, an address, or local")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one model per op family, compare it with baselines, and write a bundle."""
    from itercast.commands.shared import fit, log_training, report_table
    from itercast.learners.training_rows import memory_bytes

    folder = into or out
    if folder is None or (into and out):
        raise ValueError("train needs --out, a bundle to write, or --into, one to change")
    if storage and not trials:
        raise ValueError(f"storage {storage!r} keeps trials: it needs --trials, 1 or more")
    places = data or ["datasets"]
    families_at_once = os.cpu_count() or 1 if address else 1
    more: dict[str, object] = {"memory": memory_bytes(memory, families_at_once), "storage": storage}
    if address:
        more["fit_all"] = function_of("trainers", "ray")(address, places)
    roots = list(map(function_of("roots", "fetched"), places))
    report = fit(roots, folder, family, trials, into is not None, **more)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_tables(report_table(report))
    log_training(report, folder, roots)


def evaluate(
    case: Annotated[list[str] | None, typer.Option(help="only this case; repeatable")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="dataset root with measured iterations, or its URL, or a YAML list of your own "
            "measured steps, as --anchor takes it",
            parser=fetched_root,
        ),
    ] = None,
    bundle: Bundle = None,
    out: Annotated[Path, folder_to_write("report folder")] = Path("reports/evaluate"),
    as_json: Json = False,
) -> None:
    """Compare forecasts with measured iterations; measures this CPU unless --measured is given."""
    from itercast.commands.shared import compared, iterations
    from itercast.eval.evaluation import report_comparison
    from itercast.eval.results import summary
    from itercast.eval.tracking.store import now_ms

    begin_ms, root = now_ms(), measured or Path("runs/measured")
    if measured is None:
        with when_stopped(f"what was measured is in {root}; the same command goes on"):
            iterations(root, "cpu", case)
    with prints_aside() if as_json else nullcontext():
        rows, results = compared(root, case, bundle)
        report_comparison(
            out, results, rows, {}, root, bundle, source="itercast evaluate", begin_ms=begin_ms
        )
    if as_json:
        cases = [{**asdict(result), "error_pct": result.error_pct} for result in results]
        typer.echo(json.dumps({**summary(results), "out": str(out), "cases": cases}))


def demo(budget: Annotated[str, typer.Option(help="time for the sweep")] = "240s") -> None:
    """Sweep, train, forecast and compare on this CPU; writes reports/demo."""
    from itercast.commands.demo import run_demo

    run_demo(seconds(budget))


def list_names(
    what: Annotated[str, typer.Argument(help=", ".join(KINDS), autocompletion=kinds)] = "",
    as_json: Json = False,
) -> None:
    """List names of one kind, one per line; without a kind, the kinds."""
    names = listing(what) if what else list(KINDS)
    typer.echo(json.dumps(names) if as_json else "\n".join(names))


GROUPS = {  # in the order in which a newcomer needs them
    "Forecast": (predict, run, plan),
    "Measure": (demo, collect),
    "Learn": (train,),
    "Judge": (evaluate,),
    "Look": (list_names,),
}
OF_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class MayHaveScript(TyperCommand):
    """A command whose case may be a script, which gets the options that the command lacks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's; unknown options are an error only where no script or module is named."""
        is_script = any(word.endswith(".py") or word in ("-m", "--module") for word in args)
        ctx.ignore_unknown_options = is_script
        return super().parse_args(ctx, args)


KINDS_OF_COMMANDS = {"plan": MayHaveScript, "explain": MayHaveScript}

for group, commands in GROUPS.items():
    for command in commands:
        name = "list" if command is list_names else command.__name__  # a word of Python
        kind, context = KINDS_OF_COMMANDS.get(name), OF_A_SCRIPT if command is run else {}
        app.command(name=name, cls=kind, rich_help_panel=group, context_settings=context)(command)
for added, command in with_added("commands", {}, Callable).items():  # of our extras, too
    kind = KINDS_OF_COMMANDS.get(added)
    app.command(name=added, cls=kind, rich_help_panel="Extras")(command)
