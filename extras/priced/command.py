"""The command ``itercast price``: forecast the time of every op in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from itercast.options import Bundle, Hardware, Json


def price(
    rows: Annotated[Path, typer.Argument(help="Parquet file of ops, as in a dataset")],
    out: Annotated[Path, typer.Option(help="Parquet file to write", dir_okay=False)],
    bundle: Bundle = None,
    hardware: Hardware = None,
    among: Annotated[
        str, typer.Option(help="stacks, as the rows name them: write the fastest one of each row")
    ] = "",
    as_json: Json = False,
) -> None:
    """Forecast the time of every op in a Parquet file; write its rows with their forecasts."""
    from itercast.extras.priced.forecasts import write_forecasts
    from itercast.learners.known_bundles import find_bundle
    from itercast.learners.score_file import read_file
    from itercast.microbench.hardware.spec import load_gpu

    gpus = None
    if hardware is not None:
        gpu = load_gpu(str(hardware))
        gpus = {gpu.name: gpu}
    asked = read_file(rows)
    folder, known = find_bundle(str(asked["gpu"].iloc[0]), bundle)
    write_forecasts(asked, known, out, gpus, tuple(filter(None, among.split(","))))
    told = {"rows": len(asked), "bundle": str(folder), "out": str(out)}
    typer.echo(json.dumps(told) if as_json else f"priced {len(asked)} rows of {rows} into {out}")
