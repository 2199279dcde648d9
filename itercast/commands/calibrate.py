"""The command ``itercast calibrate``: correct a bundle for a GPU by a few measured rows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itercast.errors import one_line_errors
from itercast.options import Bundle


@one_line_errors
def calibrate(
    rows: Annotated[list[Path], typer.Argument(help="Parquet files in dataset form")],
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
    bundle: Bundle = None,
    hardware: Annotated[
        Path | None, typer.Option(help="hardware file of a GPU that is not listed")
    ] = None,
) -> None:
    """Correct a bundle for one GPU by 4 to 16 measured rows of each op family."""
    from compose.target import find_bundle
    from learners.calibrate import calibrate as pull
    from learners.calibrate import read_few
    from microbench.hardware.spec import load_gpu

    few = read_few(rows)
    own = [load_gpu(str(hardware))] if hardware is not None else []
    folder, found = find_bundle(str(few["gpu"].iloc[0]) if len(few) else "cpu", bundle)
    pull(found, few, {gpu.name: gpu for gpu in own}).save(out)
    typer.echo(f"calibrated {folder} with {len(few)} rows into {out}")
