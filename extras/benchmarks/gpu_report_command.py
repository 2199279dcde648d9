"""The command ``itercast gpu-report``: errors of models trained on the rows of one GPU."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itercast.eval.tables import output, print_tables
from itercast.options import fetched_root

if TYPE_CHECKING:
    from itercast.eval.results import CaseResult


def gpu_report(
    data: Annotated[
        Path,
        typer.Argument(help="dataset root, e.g. of a campaign; or its URL", parser=fetched_root),
    ],
    gpu: Annotated[str, typer.Option(help="train on the rows of this GPU")] = "h100-sxm-80gb",
    unseen: Annotated[
        str, typer.Option(help="also print errors on this GPU, whose rows are not trained on")
    ] = "",
    trials: Annotated[int, typer.Option(help="hyperparameter trials per family; 0: defaults")] = 0,
) -> None:
    """Train on the rows of one GPU; print errors on held-out rows of it, and on an unseen GPU."""
    from itercast.extras.benchmarks import gpu_report as tables
    from itercast.extras.benchmarks.gpu_report import error_table
    from itercast.extras.campaign.drawn_from import read_drawn_from
    from itercast.extras.campaign.summary import summary
    from itercast.learners.bundle import Bundle
    from itercast.learners.train import train
    from itercast.microbench.store import read_hardware

    with tempfile.TemporaryDirectory() as folder:
        root, bundle = Path(folder) / "known", Path(folder) / "bundle"
        tables.only_gpu(data, gpu, root)
        other = tables.only_gpu(data, unseen, Path(folder) / "unseen") if unseen else None
        output().print("\n".join(summary(data, gpu)), highlight=False)
        if (machines := tables.machines_table(data, gpu)) is not None:
            print_tables(machines)
        trained = train([root], bundle, None, trials).to_dict()
        print_tables(tables.op_table(gpu, root, read_drawn_from(data), trained))
        iterations = tables.iteration_errors(_compared(root, bundle))
        print_tables(error_table(f"{gpu}: iterations; {tables.ITERATIONS_TARGET}", iterations))
        if other is not None:
            output().print("\n".join(summary(data, unseen)), highlight=False)
            title = f"{unseen}, trained on {gpu} alone"
            known = Bundle.load(bundle)
            known = replace(known, gpus={**read_hardware([other]), **known.gpus})
            known.save(bundle)
            print_tables(error_table(f"{title}: ops", tables.unseen_errors(other, known)))
            iterations = tables.iteration_errors(_compared(other, bundle))
            print_tables(error_table(f"{title}: iterations", iterations))


def _compared(root: Path, bundle: Path) -> list[CaseResult]:
    """Measured iterations under a root of one GPU beside their forecasts."""
    from itercast.eval.compare import compare_all, measured_rows

    if not any(root.glob("iteration/*")):
        return []
    return compare_all(measured_rows(root, None), bundle)
