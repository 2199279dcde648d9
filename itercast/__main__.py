"""The command line ``itercast COMMAND``; ``itercast --help`` lists the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from itercast.capture.base.durations import seconds
from itercast.capture.base.extensions import with_added
from itercast.capture.base.slow_imports import without_scikit_learn
from itercast.commands.calibrate import calibrate
from itercast.commands.check import check
from itercast.commands.compare import compare
from itercast.commands.explain import explain
from itercast.commands.import_rows import import_rows
from itercast.commands.input import input_lane
from itercast.commands.measure.fleet import fleet
from itercast.commands.measure.gpu_report import gpu_report
from itercast.commands.plan import plan
from itercast.commands.predict import predict
from itercast.commands.run import run
from itercast.commands.throughput import throughput
from itercast.errors import OneLineGroup
from itercast.names import KINDS, kinds, listing
from itercast.options import Bundle, Families, Hardware, Json, fetched_root

app = typer.Typer(
    cls=OneLineGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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


for command in (
    *(calibrate, gpu_report, throughput, check, compare, fleet),
    *(predict, explain, plan),
):
    app.command()(command)
for name, command in with_added("commands", {}, Callable).items():  # of our extras, too
    app.command(name=name)(command)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    run
)


app.command(name="import")(import_rows)
app.command(name="input")(input_lane)


@app.command()
def collect(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    family: Families = None,
    budget: Annotated[
        str, typer.Option(help="time for this dataset root, earlier runs included: 90s, 10m, 1h")
    ] = "5m",
    out: Annotated[str, typer.Option(help="dataset root: a folder or a URL")] = "datasets",
    seed: Annotated[int, typer.Option(help="seed of the order of points")] = 0,
    torchrun: Annotated[
        str,
        typer.Option(
            help="arguments of torchrun, to measure collectives over nodes; the same on each "
            'node, e.g. "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"'
        ),
    ] = "",
    points: Annotated[
        Path | None,
        typer.Option(help="measure only the points of this file (JSON)"),
    ] = None,
    devices: Annotated[
        str, typer.Option(help="GPUs of this node to use, one worker each: all, or a number")
    ] = "1",
) -> None:
    """Measure ops on this machine into a dataset; continues an interrupted sweep."""
    from itercast.commands.shared import sweep
    from itercast.microbench.fleet.urls import written
    from itercast.microbench.processes.lanes import gpu_count

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: allowed are cpu and cuda")
    gpus = gpu_count(devices, device)
    with written(out) as root:
        rows = sweep(root, device, family, seconds(budget), seed, torchrun, points, gpus)
    typer.echo(f"{rows} new rows in {out}")


Memory = Annotated[
    str | None,
    typer.Option(
        help="memory of a family's training, such as 4GiB; trees learn from larger data on disk; "
        "default: half of the machine's"
    ),
]


@app.command()
def train(
    out: Annotated[Path | None, typer.Option(file_okay=False, help="bundle to write")] = None,
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
    from itercast.learners.beyond_memory import memory_bytes
    from itercast.microbench.fleet.urls import fetched

    folder = into or out
    if folder is None or (into and out):
        raise ValueError("train needs --out, a bundle to write, or --into, one to change")
    if storage and not trials:
        raise ValueError(f"storage {storage!r} keeps trials: it needs --trials, 1 or more")
    where, at_once = data or ["datasets"], os.cpu_count() or 1 if address else 1
    more: dict[str, object] = {"memory": memory_bytes(memory, at_once), "storage": storage}
    if address:
        from itercast.learners.apart import through_ray

        more["fit_all"] = through_ray(address, where)
    roots = list(map(fetched, where))
    report = fit(roots, folder, family, trials, into is not None, **more)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(report_table(report))
    log_training(report, folder, roots)


@app.command()
def price(
    rows: Annotated[Path, typer.Argument(help="Parquet file of ops, as in a dataset")],
    out: Annotated[Path, typer.Option(help="Parquet file to write")],
    bundle: Bundle = None,
    hardware: Hardware = None,
    among: Annotated[
        str, typer.Option(help="stacks, as the rows name them: write the fastest one of each row")
    ] = "",
) -> None:
    """Forecast the time of every op in a Parquet file; write its rows with their forecasts."""
    with without_scikit_learn():
        from itercast.learners.known_bundles import find_bundle
        from itercast.learners.score_file import read_file, write_forecasts
    from itercast.microbench.hardware.spec import load_gpu

    gpus = None
    if hardware is not None:
        gpu = load_gpu(str(hardware))
        gpus = {gpu.name: gpu}
    asked = read_file(rows)
    known = find_bundle(str(asked["gpu"].iloc[0]) if len(asked) else "cpu", bundle)[1]
    write_forecasts(asked, known, out, gpus, tuple(filter(None, among.split(","))))
    typer.echo(f"priced {rows} into {out}")


@app.command()
def evaluate(
    case: Annotated[list[str] | None, typer.Option(help="only this case; repeatable")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="dataset root with measured iterations, or its URL", parser=fetched_root),
    ] = None,
    bundle: Bundle = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="report folder")] = Path(
        "reports/evaluate"
    ),
    learners: Annotated[
        Path | None,
        typer.Option(help="dataset root: also rank other learners, trained on it; needs --bundle"),
    ] = None,
) -> None:
    """Compare forecasts with measured iterations; measures this CPU unless --measured is given."""
    if learners is not None and bundle is None:
        raise ValueError("--learners needs --bundle, whose models are compared with them")
    from itercast.commands.shared import iterations
    from itercast.eval.compare import compare_all, measured_rows
    from itercast.eval.report.write import report_comparison
    from itercast.eval.tracking.store import now_ms

    begin_ms, root = now_ms(), measured or Path("runs/measured")
    if measured is None:
        iterations(root, "cpu", (0, 1), case)
    rows = measured_rows(root, case)
    results = compare_all(rows, bundle)
    said = "itercast evaluate"
    report_comparison(out, results, rows, {}, root, bundle, source=said, begin_ms=begin_ms)
    if learners is not None and bundle is not None:
        from itercast.eval.learner_ranking import rank_learners

        rank_learners(rows, results, bundle, learners, out)


@app.command()
def report(
    reports: Annotated[Path, typer.Option(help="folder that holds the report folders")] = Path(
        "reports"
    ),
) -> None:
    """Write the report pages of demo and evaluate again, from the files that these left.

    The first time each sweep is replayed, to find its error against minutes of sweep.
    """
    from itercast.eval.report.write import rewrite

    for page in rewrite(reports):
        typer.echo(page)


@app.command()
def demo(
    budget: Annotated[str, typer.Option(help="time for the sweep")] = "220s",
) -> None:
    """Sweep, train, forecast and compare on this CPU; writes reports/demo."""
    from itercast.commands.demo import run_demo

    run_demo(seconds(budget))


@app.command(name="list")
def list_names(
    what: Annotated[str, typer.Argument(help=", ".join(KINDS), autocompletion=kinds)] = "",
) -> None:
    """List names of one kind, one per line; without a kind, the kinds."""
    for name in listing(what) if what else KINDS:
        typer.echo(name)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on this machine")] = 5000,
) -> None:
    """Serve the MLflow UI of this project; its first page compares learners."""
    from itercast.eval.tracking.start_page import HOST, run_server
    from itercast.eval.tracking.store import addresses, is_server, tracking_uri

    if is_server(uri := tracking_uri()):
        typer.echo("\n".join(addresses(uri)))
    else:
        typer.echo(f"MLflow UI: http://{HOST}:{port}  (Ctrl-C ends it)")
        raise typer.Exit(run_server(port))


if __name__ == "__main__":
    app()
