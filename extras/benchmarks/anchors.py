"""What one measured step tells of others: `python -m itercast.extras.benchmarks.anchors FOLDER`.

FOLDER holds files of measured steps, one a source, as ``--anchor`` takes them. Each step is
forecast on a typical machine, and with one other step of its file on such a GPU as anchor: the next
one of the same model, and the next one of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from itercast.anchors import measured_steps
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.target import forecast_step
from itercast.eval.progress import progress_bar
from itercast.extras.anchors.told import run_of, told
from itercast.extras.programs import run_program
from itercast.options import Question

KINDS = ("of the same model", "of another model")


def pairs(steps: Sequence[MeasuredStep]) -> Iterator[tuple[str, int, int]]:
    """Kind of anchor, a step and its anchor: the next one of each kind in the order of the file.

    A step of the same run is none: it would be the answer. Nor is one on another GPU.
    """
    runs = [run_of(step.step, step.target) for step in steps]
    gpus = [step.target.gpu.name for step in steps]
    for at, step in enumerate(steps):
        following = (*range(at + 1, len(steps)), *range(at))
        others = [i for i in following if runs[i] != runs[at] and gpus[i] == gpus[at]]
        for kind in KINDS:
            same = kind == KINDS[0]
            for other in [i for i in others if (steps[i].name == step.name) == same][:1]:
                yield kind, at, other


def anchored(source: str, steps: Sequence[MeasuredStep]) -> Iterator[dict[str, object]]:
    """By step and kind of anchor the errors in % without and with it.

    An anchor that ``--anchor`` refuses tells nothing: the step has no line.
    """
    alone_us = [forecast_step(one.step, one.target).iteration_us for one in steps]
    for kind, at, other in pairs(steps):
        try:
            known = told([steps[other]]).machine
        except ValueError:
            continue
        target = replace(steps[at].target, known=known)
        times = {
            "without": alone_us[at],
            "with": forecast_step(steps[at].step, target).iteration_us,
        }
        errors = {name: 100 * (us / steps[at].time_us - 1) for name, us in times.items()}
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
