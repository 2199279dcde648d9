"""How well forecasts tell plans of one model apart, by pairs of plans on equally many ranks.

``python -m itercast.extras.benchmarks.plan_pairs evaluation.json`` reads what ``itercast evaluate``
wrote beside its report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from itercast.extras.programs import run_program

SAME_IN_PAIR = ("gpu", "model", "ranks", "samples")
SHARE = 0.8  # of the pairs


def differences(cases: Sequence[Mapping[str, Any]]) -> list[float]:
    """abs(log(measured a / b) - log(forecast a / b)) of each pair of plans of one model.

    ``cases``: as in the report of ``itercast evaluate``.
    """
    pairs = (
        (a, b)
        for a, b in combinations(cases, 2)
        if all(a[name] == b[name] for name in SAME_IN_PAIR) and a["plan"] != b["plan"]
    )
    return [
        abs(log(a["measured_us"] / b["measured_us"]) - log(a["predicted_us"] / b["predicted_us"]))
        for a, b in pairs
    ]


def main(evaluation: Annotated[Path, typer.Argument(exists=True, dir_okay=False)]) -> None:
    """Print the number of pairs, and quantiles of how much forecast and measured ratios differ."""
    logs = differences(json.loads(evaluation.read_text())["cases"])
    if not logs:
        raise ValueError(f"{str(evaluation)!r}: no two plans of one model on as many ranks")
    typer.echo(f"{len(logs)} pairs; {SHARE:.0%} differ by {np.quantile(logs, SHARE):.3f} at most")


if __name__ == "__main__":
    run_program(main)
