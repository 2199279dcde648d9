"""What one measured step tells of others: `python -m itercast.extras.benchmarks.anchors FOLDER`.

FOLDER holds files of measured steps, one a source, as ``--anchor`` takes them. Each step is
forecast on a typical machine, and with one other step of its file as anchor: the next one of the
same model, and the next one of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from itercast.anchors import measured_steps
from itercast.compose.anchors import MeasuredStep, run_of, told
from itercast.compose.target import forecast_step
from itercast.eval.progress import progress_bar
from itercast.extras.programs import run_program
from itercast.options import Question

KINDS = ("of the same model", "of another model")


def pairs(steps: Sequence[MeasuredStep]) -> Iterator[tuple[str, MeasuredStep, MeasuredStep]]:
    """Kind of anchor, a step and its anchor: the next one of each kind in the order of the file.

    A step of the same run is none: it would be the answer.
    """
    for at, step in enumerate(steps):
        following = [*steps[at + 1 :], *steps[:at]]
        others = [
            x for x in following if run_of(x.step, x.target) != run_of(step.step, step.target)
        ]
        for kind in KINDS:
            same = kind == KINDS[0]
            if found := [x for x in others if (x.name == step.name) == same][:1]:
                yield kind, step, found[0]


def anchored(source: str, steps: Sequence[MeasuredStep]) -> Iterator[dict[str, object]]:
    """By step and kind of anchor the errors in % without and with it.

    An anchor that ``--anchor`` refuses tells nothing: the step has no line.
    """

    @cache
    def alone_us(at: int) -> float:
        return forecast_step(steps[at].step, steps[at].target).iteration_us

    numbers = {id(step): at for at, step in enumerate(steps)}
    for kind, step, other in pairs(steps):
        try:
            known = told([other]).machine
        except ValueError:
            continue
        with_it = forecast_step(step.step, replace(step.target, known=known)).iteration_us
        times = {"without": alone_us(numbers[id(step)]), "with": with_it}
        errors = {name: 100 * (us / step.time_us - 1) for name, us in times.items()}
        yield {"source": source, "kind": kind, **errors}


def lines(found: pd.DataFrame) -> pd.DataFrame:
    """By kind of anchor: sources, steps, and means over sources of absolute errors and biases."""
    errors = found[["without", "with"]]
    by = [found["kind"], found["source"]]
    sources = pd.concat(
        {"error %": errors.abs().groupby(by).mean(), "bias %": errors.groupby(by).mean()}, axis=1
    )
    means = sources.groupby("kind").mean()
    means.columns = [" ".join(names) for names in means.columns]
    counts = found.groupby("kind")["source"].agg(["nunique", "size"])
    counts.columns = ["sources", "steps"]
    return counts.join(means)


def main(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    """Print errors without and with one measured step as anchor, of its own and another model."""
    files = sorted(folder.glob("*.yaml"))
    found: list[dict[str, object]] = []
    with progress_bar() as bar:
        for file in bar.track(files, description="anchors"):
            found += anchored(file.stem, measured_steps(file, Question))
    if not found:
        raise ValueError(f"{str(folder)!r}: no file (YAML) with two measured steps")
    typer.echo(lines(pd.DataFrame(found)).round(1).to_string())


if __name__ == "__main__":
    run_program(main)
