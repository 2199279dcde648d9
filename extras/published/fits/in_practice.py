"""Trainings beside benchmarks: `python -m itercast.extras.published.fits.in_practice PARTS`.

Prints how many times as long as forecast the steps of each source took (geometric mean), by whether
somebody trained a model or timed a benchmark (in_practice.yaml), and whether on text. The source is
left out of all that is fitted (PARTS is written by `itercast.extras.published.fits.machines`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from itercast.capture.base.yaml_text import facts_of
from itercast.extras.programs import run_program
from itercast.extras.published.fits.machine_fit import written_parts
from itercast.extras.published.roles import ROLES

TRAININGS: frozenset[str] = frozenset(facts_of(__file__)["trainings"])


def times_by_source(steps: pd.DataFrame) -> pd.DataFrame:
    """How many ``times`` as long as forecast steps took, by source and whether they are of text.

    Columns source, log_ratio (measured over forecast), seq (0 or NaN where samples are no tokens).
    ``training``: whether the source's are trainings.
    """
    kinds = ["source", steps["seq"].gt(0).rename("text")]
    found: pd.DataFrame = (
        np.exp(steps.groupby(kinds)["log_ratio"].mean()).rename("times").reset_index()
    )
    found["training"] = found["source"].isin(TRAININGS)
    return found


def main(
    parts: Annotated[Path, typer.Argument(help="folder of derivatives", exists=True)],
    judge: Annotated[bool, typer.Option(help="sources that judge instead")] = False,
) -> None:
    """Print how many times as long as forecast trainings and benchmarks took."""
    roles = [role for role in ROLES if (role != "finds causes") is judge]
    found = times_by_source(written_parts(parts, roles))
    for (training, text), mine in found.groupby(["training", "text"]):
        low, median, high = mine["times"].quantile([0.1, 0.5, 0.9])
        name = "trainings" if training else "benchmarks"
        told = f"median {median:.2f}, mean {mine['times'].mean():.2f}, {low:.2f} to {high:.2f}"
        print(f"{name}, {'text' if text else 'no text'}: {len(mine)} sources, {told}")


if __name__ == "__main__":
    run_program(main)
