"""The command ``itercast bench-public``: errors on published measurements beside baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from itercast.options import Json
from itercast.outputs import folder_to_write


def bench_public(
    public: Annotated[Path, typer.Argument(help="folder of published measurements, by source")],
    out: Annotated[Path, folder_to_write("report folder")] = Path("reports/bench-public"),
    line: Annotated[str, typer.Option(help="only results whose name contains this text")] = "",
    leave_out: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="only errors on this source's rows, with the source left out and with it",
        ),
    ] = "",
    bundle: Annotated[
        Path | None, typer.Option(help="bundle that forecasts iterations; default: the shipped one")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge forecasts by published measurements, beside baselines; logs to MLflow.

    A second table leaves sources out: errors on the rows of each source by forecasts that use
    neither its rows nor assumed numbers that were fitted on it.
    """
    from itercast.commands.shared import log_last
    from itercast.eval.tracking.logs import log_bench
    from itercast.extras.published.report import line_names, report
    from itercast.learners.bundle import SHIPPED

    if not any(line in name for name in line_names()):
        raise ValueError(f"line {line!r}: no line's name contains it; lines: {line_names()}")
    results, text = report(public, line, leave_out, bundle or SHIPPED, out)
    scores = [(r.line, r.part, name, s) for r in results for name, s in r.scores.items()]
    if as_json:
        lines = [dict(zip(("line", "part", "learner", "errors"), s, strict=True)) for s in scores]
        typer.echo(json.dumps(lines))
    else:
        typer.echo(text)
    log_last(log_bench, scores, out)
