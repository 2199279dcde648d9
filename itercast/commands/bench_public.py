"""itercast bench-public: the table of errors on other people's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itercast.errors import one_line_errors


@one_line_errors
def bench_public(
    public: Annotated[Path, typer.Argument(help="folder with NeuSight, aiconfigurator, vidur")],
    out: Annotated[Path, typer.Option(help="report folder")] = Path("reports/bench-public"),
    line: Annotated[str, typer.Option(help="only lines whose name holds this text")] = "",
    bundle: Annotated[
        Path | None, typer.Option(help="bundle that forecasts whole models; default: shipped")
    ] = None,
) -> None:
    """Reprint the table of errors on public measurements beside baselines; logs to MLflow."""
    from eval.public.models import model_lines, run_models
    from eval.public.op_lines import lines
    from eval.public.table import markdown, run
    from eval.tracking import log_bench
    from learners.bundle import SHIPPED

    names = sorted({x.name for x in lines()} | {x.name for x in model_lines()})
    if not any(line in name for name in names):
        raise ValueError(f"no line named {line!r}; there are {names}")
    results = [*run(public, line), *run_models(public, line, bundle or SHIPPED)]
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (out / "bench-public.md").write_text(text)
    log_bench(results, out)
    typer.echo(text)
