"""The command ``itercast import``: convert published measurements into a dataset."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itercast.names import completing
from itercast.options import Json
from itercast.outputs import folder_to_write

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.extras.imports.base import Hints
    from itercast.microbench.hardware.spec import Gpu
    from itercast.microbench.store import Facts, Row


def import_rows(
    source: Annotated[
        str,
        typer.Argument(
            help="e.g. neusight; `itercast list sources` prints them",
            autocompletion=completing("sources"),
        ),
    ],
    path: Annotated[Path, typer.Argument(help="clone, folder or file of that source")],
    out: Annotated[str, folder_to_write("dataset root: a folder or a URL")] = "imported",
    gpu: Annotated[
        str, typer.Option(help="nccl-tests, kineto: GPU name or YAML file, if the log does not say")
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=0, help="nccl-tests: number of nodes, if the log does not say")
    ] = 0,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="nccl-tests: GPUs per node, if the log does not say")
    ] = 0,
    node: Annotated[str, typer.Option(help="nccl-tests: node name or YAML file")] = "",
    as_json: Json = False,
) -> None:
    """Convert published measurements into dataset rows; prints how many were left out, and why."""
    from itercast.extras.imports.sources import read_source
    from itercast.extras.imports.write import write
    from itercast.extras.roots.urls import written

    hints, hardware = given(gpu, nodes, gpus_per_node, node)
    imported = read_source(source, path, hints)
    with written(out) as root:
        write(imported, root, hardware)
    report: Row = {
        "source": source,
        "out": str(out),
        "rows": {family: len(rows) for family, rows in imported.rows.items()},
        "gpus": sorted({str(g) for rows in imported.rows.values() for g in rows["gpu"]}),
        "dropped": dict(imported.dropped),
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report)
    if not report["rows"]:
        raise typer.Exit(1)


def print_report(report: Facts) -> None:
    """Print how many rows of each family were imported, and how many were left out by reason."""
    for family, count in report["rows"].items():
        typer.echo(f"{count:8d} rows of {family}")
    for reason, count in report["dropped"].items():
        typer.echo(f"{count:8d} left out: {reason}")
    typer.echo(f"{sum(report['rows'].values())} rows in {report['out']}")


def given(gpu: str, nodes: int, gpus_per_node: int, node: str) -> tuple[Hints, Gpu | None]:
    """Hints about the machine from the options, and the GPU they name; ValueError if unknown."""
    from itercast.extras.imports.base import Hints
    from itercast.microbench.hardware.node import load_node
    from itercast.microbench.hardware.spec import load_gpu

    kind = load_node(node) if node else None
    named = gpu or (kind.gpu if kind else "")
    own = load_gpu(named) if named else None
    if own is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", own.name):
        raise ValueError(f"gpu {own.name!r}: allowed are lower-case letters, digits, - and .")
    hints = Hints(
        gpu=own.name if own else "",
        nodes=nodes,
        gpus_per_node=gpus_per_node or (kind.gpus_per_node if kind else 0),
        node=kind,
    )
    return hints, own
