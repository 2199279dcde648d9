"""What one measured step tells of others: `python -m itercast.extras.benchmarks.anchors FOLDER`.

FOLDER holds files of measured steps, one a source, as ``--anchor`` takes them. Each step is
forecast on a typical machine, and with one anchor: the next step in its file on the same kind of
GPU, once of the same model and once of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from itercast.anchors import measured_steps
from itercast.compose.measured_step import Measured
from itercast.eval.progress import progress_bar
from itercast.extras.anchors.infer_machine import infer_machine
from itercast.extras.programs import run_program
from itercast.options import Question

SAME_MODEL, OTHER_MODEL = "of the same model", "of another model"


def pairs(steps: Sequence[Measured]) -> Iterator[tuple[str, int, int]]:
    """Kind of anchor, index of a step, index of its anchor.

    The anchor is the next step of each kind in the order of the file. A step of the same run is
    never an anchor, as it would be the answer; nor is one on another GPU.
    """
    runs = [step.run for step in steps]
    gpus = [step.target.gpu.name for step in steps]
    for i, step in enumerate(steps):
        anchor_of_kind: dict[str, int] = {}
        for j in (*range(i + 1, len(steps)), *range(i)):
            if runs[j] != runs[i] and gpus[j] == gpus[i]:
                kind = SAME_MODEL if steps[j].name == step.name else OTHER_MODEL
                anchor_of_kind.setdefault(kind, j)
        for kind in (SAME_MODEL, OTHER_MODEL):
            if kind in anchor_of_kind:
                yield kind, i, anchor_of_kind[kind]


def anchored(source: str, steps: Sequence[Measured]) -> Iterator[dict[str, object]]:
    """By step and kind of anchor the errors in % without and with it.

    Steps whose anchor ``--anchor`` would refuse are left out.
    """
    alone_us = [step.forecast(step.target).iteration_us for step in steps]
    for kind, i, anchor in pairs(steps):
        try:
            known = infer_machine([steps[anchor]]).machine
        except ValueError:
            continue
        target = replace(steps[i].target, known=known)
        anchored_us = steps[i].forecast(target).iteration_us
        times = {"without": alone_us[i], "with": anchored_us}
        errors = {name: 100 * (us / steps[i].time_us - 1) for name, us in times.items()}
        yield {"source": source, "kind": kind, **errors}


def lines(errors_of_steps: pd.DataFrame) -> pd.DataFrame:
    """By kind of anchor: sources, steps, and means over sources of absolute errors and biases."""
    errors = errors_of_steps[["without", "with"]]
    by = [errors_of_steps["kind"], errors_of_steps["source"]]
    sources = pd.concat(
        {"error %": errors.abs().groupby(by).mean(), "bias %": errors.groupby(by).mean()}, axis=1
    )
    means = sources.groupby("kind").mean()
    means.columns = [" ".join(names) for names in means.columns]
    counts = errors_of_steps.groupby("kind")["source"].agg(["nunique", "size"])
    counts.columns = ["sources", "steps"]
    return counts.join(means)


def main(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    """Print errors without and with one measured step as anchor, of its own and another model."""
    files = sorted(folder.glob("*.yaml"))
    errors: list[dict[str, object]] = []
    with progress_bar() as bar:
        for file in bar.track(files, description="anchors"):
            errors += anchored(file.stem, measured_steps(file, Question))
    if not errors:
        raise ValueError(f"{str(folder)!r}: no file (YAML) with two measured steps")
    typer.echo(lines(pd.DataFrame(errors)).round(1).to_string())


if __name__ == "__main__":
    run_program(main)
