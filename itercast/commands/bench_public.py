"""The command ``itercast bench-public``: errors on published measurements beside baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itercast.errors import one_line_errors


@one_line_errors
def bench_public(
    public: Annotated[
        Path,
        typer.Argument(
            help="folder with NeuSight, aiconfigurator, vidur, nccl-tests and iterations"
        ),
    ],
    out: Annotated[Path, typer.Option(help="report folder")] = Path("reports/bench-public"),
    line: Annotated[str, typer.Option(help="only lines whose name contains this text")] = "",
    bundle: Annotated[
        Path | None,
        typer.Option(help="bundle that forecasts whole models; default: the one that ships"),
    ] = None,
) -> None:
    """Score forecasts on published measurements beside baselines; logs to MLflow."""
    from eval.public.models import model_lines, run_models
    from eval.public.op_lines import lines
    from eval.public.table import markdown, run
    from eval.tracking import log_bench
    from learners.bundle import SHIPPED

    names = sorted({x.name for x in lines()} | {x.name for x in model_lines()})
    if not any(line in name for name in names):
        raise ValueError(f"line {line!r}: no line's name contains it; lines: {names}")
    results = [*run(public, line), *run_models(public, line, bundle or SHIPPED)]
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (out / "bench-public.md").write_text(text)
    log_bench(results, out)
    typer.echo(text)
