"""The command ``itercast check``: whether a bundle still fits this machine."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from itercast.capture.base.durations import seconds
from itercast.eval.tables import headed, print_tables
from itercast.options import Bundle, Json, fetched_root

if TYPE_CHECKING:
    from itercast.extras.drift.compare import Check
    from itercast.learners.bundle import Bundle as LearnedBundle
    from itercast.microbench.hardware.spec import Gpu


def check(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    bundle: Bundle = None,
    budget: Annotated[str, typer.Option(help="time to measure: 90s, 2m")] = "60s",
    seed: Annotated[int, typer.Option(help="seed of the order of points")] = 0,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="judge the rows of this dataset root or URL (one device) instead of measuring",
            parser=fetched_root,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure some ops of every family again; exit code 1 if the bundle does not fit them."""
    from itercast.extras.drift.compare import check_rows
    from itercast.learners.known_bundles import find_bundle

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: allowed are cpu and cuda")
    name = device_name(device, measured)
    folder, known = find_bundle(name, bundle)
    with tempfile.TemporaryDirectory() as empty:
        root = measured or Path(empty)
        if measured is None:
            measure(root, device, known, name, seconds(budget), seed)
        result = check_rows(root, known, known_gpu(known, name))
    if as_json:
        shown = {"bundle": str(folder), "fits": result.fits, "verdict": result.verdict}
        typer.echo(json.dumps({**shown, **asdict(result)}))
    else:
        print_tables(*check_tables(result))
        typer.echo(f"{result.verdict} Bundle: {folder}")
    raise typer.Exit(0 if result.fits else 1)


def device_name(device: str, measured: Path | None) -> str:
    """The name of the device whose rows are judged; "cpu" for this machine's CPU."""
    from itercast.microbench.store import read_hardware
    from itercast.microbench.sweep.cards import cuda_gpu

    if measured is None:
        return "cpu" if device == "cpu" else str(cuda_gpu().name)
    if not measured.is_dir():
        raise ValueError(f"measured {str(measured)!r}: no such folder")
    names = sorted(read_hardware([measured]))
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise ValueError(f"measured {str(measured)!r}: rows of one device are judged, got {listed}")
    return names[0]


def known_gpu(bundle: LearnedBundle, name: str) -> Gpu:
    """Finds the bundle's hardware of this name; for ``cpu`` the one by which CPUs are forecast."""
    from itercast.learners.known_bundles import find_gpu

    if name != "cpu" and name not in bundle.gpus:
        known = ", ".join(sorted(bundle.gpus))
        raise ValueError(
            f"bundle: no rows of {name}, which `itercast collect` measures and `itercast train` "
            f"learns from; it has {known}"
        )
    return find_gpu(name, bundle)


def measure(
    root: Path, device: str, bundle: LearnedBundle, name: str, budget_s: float, seed: int
) -> None:
    """Measure the points to compare into ``root``, with a progress bar."""
    from itercast.eval.progress import rows_bar
    from itercast.extras.drift.compare import measure_again

    gpu = known_gpu(bundle, name)
    with rows_bar("check") as show:
        measure_again(root, device, bundle, gpu, budget_s, seed, show)


def check_tables(check: Check) -> list[Table]:
    """A table of measured over forecast times by family, and one of what changed, if anything."""
    title = "measured time / forecast, at the speed of the machine at training"
    heads = ("family", "points", "median", "p10", "p90", "margin %", "retest %", "drifted")
    table = headed(title, *heads, texts=("family", "drifted"))
    for family in check.families:
        numbers = [f"{x:.2f}" for x in (family.ratio, family.ratio_p10, family.ratio_p90)]
        retest = "-" if family.retest_pct is None else f"{family.retest_pct:.1f}"
        drifted = {True: "yes", False: "no", None: "too few points"}[family.drifted]
        table.add_row(
            family.family, str(family.points), *numbers, f"{family.margin_pct:.1f}", retest, drifted
        )
    if not check.changes:
        return [table]
    other = Table("what", "recorded", "now", title="changed since training")
    for change in check.changes:
        other.add_row(change.what, change.recorded, change.now)
    return [table, other]
