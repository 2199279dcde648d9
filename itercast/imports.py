"""The command ``itercast import``: measurements of others become a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from itercast.errors import one_line_errors

Count = Annotated[int, typer.Option(min=0, help="nccl-tests: where neither file nor log says")]


@one_line_errors
def import_rows(
    source: Annotated[
        str, typer.Argument(help="neusight, aiconfigurator, vidur, nccl-tests, kineto, iterations")
    ],
    path: Annotated[Path, typer.Argument(help="checkout, folder or file of that source")],
    out: Annotated[Path, typer.Option(help="dataset root")] = Path("imported"),
    gpu: Annotated[str, typer.Option(help="nccl-tests, kineto: where the file does not say")] = "",
    nodes: Count = 0,
    gpus_per_node: Count = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Turn measurements of others into dataset rows; prints what became of every row."""
    from microbench.hardware.spec import load_gpu
    from microbench.importers.base import Hints
    from microbench.importers.sources import read_source
    from microbench.importers.write import write

    named = load_gpu(gpu).name if gpu else ""
    hints = Hints(gpu=named, nodes=nodes, gpus_per_node=gpus_per_node)
    imported = read_source(source, path, hints)
    write(imported, out)
    report: dict[str, Any] = {
        "source": source,
        "out": str(out),
        "rows": {family: len(rows) for family, rows in imported.rows.items()},
        "gpus": sorted({str(g) for rows in imported.rows.values() for g in rows["gpu"]}),
        "dropped": dict(imported.dropped),
    }
    if as_json:
        typer.echo(json.dumps(report))
        return
    for family, count in report["rows"].items():
        typer.echo(f"{count:8d} rows of {family}")
    for reason, count in report["dropped"].items():
        typer.echo(f"{count:8d} left out: {reason}")
    typer.echo(f"{sum(report['rows'].values())} rows in {out}")
