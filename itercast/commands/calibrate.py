"""itercast calibrate: a few measured rows of a GPU pull a bundle's forecasts close."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itercast.errors import one_line_errors


@one_line_errors
def calibrate(
    rows: Annotated[list[Path], typer.Argument(help="Parquet files in dataset form")],
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
    bundle: Annotated[
        Path | None, typer.Option(help="bundle folder; default: local, else shipped")
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="YAML of a GPU of one's own")] = None,
) -> None:
    """Pull a bundle's forecasts close to a few measured rows (4-16 a family) of a GPU."""
    from compose.target import find_bundle
    from learners.calibrate import calibrate as pull
    from learners.calibrate import read_few
    from microbench.hardware.spec import load_gpu

    few = read_few(rows)
    own = [load_gpu(str(hardware))] if hardware is not None else []
    folder, found = find_bundle(str(few["gpu"].iloc[0]) if len(few) else "cpu", bundle)
    pull(found, few, {gpu.name: gpu for gpu in own}).save(out)
    typer.echo(f"calibrated {folder} with {len(few)} rows into {out}")
