"""The command ``itercast points``: choose the points that a second sweep should measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itercast.errors import one_line_errors
from itercast.microbench.durations import seconds
from itercast.options import Families


@one_line_errors
def points(
    gpu: Annotated[str, typer.Option(help="GPU to measure, with rows of a first sweep, or cpu")],
    out: Annotated[
        Path, typer.Option(help="file of points to write, for `itercast collect --points`")
    ],
    data: Annotated[list[Path] | None, typer.Option(help="dataset root; repeatable")] = None,
    family: Families = None,
    budget: Annotated[str, typer.Option(help="time of the second sweep: 90s, 10m, 1h")] = "5m",
    seed: Annotated[int, typer.Option(help="random seed")] = 1,
) -> None:
    """Choose points for a second sweep: where models disagree most per second of measuring."""
    from itercast.learners.active import next_pass
    from itercast.microbench.hardware.machine import cpu_name
    from itercast.microbench.sweep.captured_points import write_points

    name = cpu_name() if gpu == "cpu" else gpu
    found = next_pass(data or [Path("datasets")], name, family, seconds(budget), seed)
    write_points(out, found)
    counts = ", ".join(f"{len(some)} {family}" for family, some in sorted(found.items()))
    typer.echo(f"{sum(map(len, found.values()))} points in {out}: {counts}")
