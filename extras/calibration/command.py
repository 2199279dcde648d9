"""The command ``itercast calibrate``: correct a bundle, or a host, by a few measured rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itercast.capture.base.durations import counted
from itercast.options import Bundle, Hardware, Json, Question
from itercast.outputs import folder_to_write

if TYPE_CHECKING:  # the command line starts without pandas
    import pandas as pd

    from itercast.microbench.store import Row


def calibrate(
    rows: Annotated[
        list[Path],
        typer.Argument(
            help="Parquet files of measured rows, or dataset roots; with --iterations one file of "
            "measured steps, YAML or Parquet"
        ),
    ],
    out: Annotated[Path | None, folder_to_write("bundle folder to write")] = None,
    bundle: Bundle = None,
    hardware: Hardware = None,
    host: Annotated[
        Path | None,
        typer.Option(
            help="host file to write, fitted to rows of family host or to small iterations"
        ),
    ] = None,
    iterations: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="machine file to write, of what measured steps tell"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Correct a bundle for one GPU by measured rows (4 of a family suffice), or fit a host file."""
    if out is None and host is None and iterations is None:
        raise ValueError(
            "calibrate writes a bundle (--out), a host (--host) or a machine file (--iterations)"
        )
    if out is not None:
        from itercast.learners.bundle import check_out

        check_out(out)
    if iterations is not None:
        _write_machine(iterations, rows, bundle, as_json=as_json)
    if out is None and host is None:
        return
    from itercast.learners.score_file import read_few
    from itercast.learners.training_rows import with_mean_times

    few = with_mean_times(read_few(rows))
    result: Row = {"rows": len(few)}
    if host is not None:
        result |= _write_host(host, few, bundle)
    if out is not None:
        result |= _write_bundle(out, few, bundle, hardware)
    if as_json:
        typer.echo(json.dumps(result))
        return
    if host is not None:
        speed = f"slowdown {result['slowdown']:g}, {result['launch_us']:g} us a launch"
        typer.echo(f"host {result['host']}: {speed}; {host}")
    if out is not None:
        typer.echo(f"calibrated {result['bundle']} with {len(few)} rows into {out}")


def _write_machine(path: Path, rows: list[Path], bundle: Path | None, *, as_json: bool) -> None:
    """Write what measured steps tell of their machine, and print it in words."""
    from itercast.anchors import measured_steps
    from itercast.capture.base.files import write_atomic
    from itercast.extras.anchors.infer_machine import factor_lines, infer_machine

    steps = [step for file in rows for step in measured_steps(file, Question, bundle)]
    known = infer_machine(steps)
    write_atomic(path, known.text().encode())
    lines = factor_lines(known.machine, known.gpu)
    if as_json:
        typer.echo(json.dumps({"machine": lines, "gpu": known.gpu, "steps": list(known.anchors)}))
        return
    for line in lines:
        typer.echo(line)
    measured = counted(len(known.anchors), "measured step")
    typer.echo(f"{measured}; itercast predict ... --machine {path}")


def _write_bundle(out: Path, few: pd.DataFrame, bundle: Path | None, hardware: Path | None) -> Row:
    """Write the corrected bundle to ``out``; returns its folder and the original's."""
    from itercast.extras.calibration.few_rows import calibrate_bundle
    from itercast.learners.known_bundles import find_bundle
    from itercast.learners.score_file import check_parameters
    from itercast.microbench.hardware.spec import load_gpu

    for name, rows in few.groupby("family"):
        check_parameters(str(name), rows)
    own = [load_gpu(str(hardware))] if hardware is not None else []
    folder, uncorrected = find_bundle(str(few["gpu"].iloc[0]) if len(few) else "cpu", bundle)
    calibrate_bundle(uncorrected, few, {gpu.name: gpu for gpu in own}).save(out)
    return {"bundle": str(folder), "out": str(out)}


def _write_host(path: Path, few: pd.DataFrame, bundle: Path | None) -> Row:
    """Fit a host to timed Python events, else to iterations; write it, return its numbers."""
    from itercast.capture.base.files import write_atomic
    from itercast.eval.compare import measured_steps
    from itercast.extras.calibration.host_fit import (
        check_host_file,
        fit_host,
        host_of_events,
        host_yaml,
    )

    name = check_host_file(path)
    gpus = sorted(set(few["gpu"]))
    if len(gpus) > 1:
        raise ValueError(f"a host is beside GPUs of one kind, got rows of {', '.join(gpus)}")
    source = f"itercast calibrate, {len(few)} rows on {gpus[0]}"
    host = host_of_events(few, name, source)
    if host is None:
        host = fit_host(name, measured_steps(few, bundle), source=source)
    write_atomic(path, host_yaml(host).encode())
    return {"host": name, "slowdown": host.slowdown, "launch_us": host.launch_us}
