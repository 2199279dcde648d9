"""The command ``itercast import``: measurements of others become a dataset."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from itercast.errors import one_line_errors

if TYPE_CHECKING:
    from microbench.hardware.spec import Gpu
    from microbench.importers.base import Hints


@one_line_errors
def import_rows(
    source: Annotated[
        str, typer.Argument(help="neusight, aiconfigurator, vidur, nccl-tests, kineto, iterations")
    ],
    path: Annotated[Path, typer.Argument(help="checkout, folder or file of that source")],
    out: Annotated[Path, typer.Option(help="dataset root")] = Path("imported"),
    gpu: Annotated[
        str, typer.Option(help="nccl-tests, kineto: name or YAML file, where the log does not say")
    ] = "",
    nodes: Annotated[int, typer.Option(min=0, help="nccl-tests: where the log does not say")] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="nccl-tests: as --nodes")] = 0,
    node: Annotated[
        str, typer.Option(help="nccl-tests: name or YAML file of the kind of node")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Turn measurements of others into dataset rows; says what became of every row."""
    from microbench.importers.sources import read_source
    from microbench.importers.write import write

    hints, own = given(gpu, nodes, gpus_per_node, node)
    imported = read_source(source, path, hints)
    write(imported, out, own)
    report: dict[str, Any] = {
        "source": source,
        "out": str(out),
        "rows": {family: len(rows) for family, rows in imported.rows.items()},
        "gpus": sorted({str(g) for rows in imported.rows.values() for g in rows["gpu"]}),
        "dropped": dict(imported.dropped),
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        for family, count in report["rows"].items():
            typer.echo(f"{count:8d} rows of {family}")
        for reason, count in report["dropped"].items():
            typer.echo(f"{count:8d} left out: {reason}")
        typer.echo(f"{sum(report['rows'].values())} rows in {out}")
    if not report["rows"]:
        raise typer.Exit(1)


def given(gpu: str, nodes: int, gpus_per_node: int, node: str) -> tuple[Hints, Gpu | None]:
    """What the options say about the machine, and the GPU they describe; ValueError if unknown."""
    from microbench.hardware.node import load_node
    from microbench.hardware.spec import load_gpu
    from microbench.importers.base import Hints

    kind = load_node(node) if node else None
    named = gpu or (kind.gpu if kind else "")
    own = load_gpu(named) if named else None
    if own is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", own.name):
        raise ValueError(f"gpu {own.name!r}: a name has small letters, digits, dashes and points")
    hints = Hints(
        gpu=own.name if own else "",
        nodes=nodes,
        gpus_per_node=gpus_per_node or (kind.gpus_per_node if kind else 0),
        node=kind,
    )
    return hints, own
