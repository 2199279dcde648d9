"""How much of the time of held-out models is in calls inside a bundle's envelope, by op family.

``python -m itercast.extras.benchmarks.envelope`` captures a step of each held-out model of the
catalogue (``itercast.extras.campaign.catalogue``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.table import Table

from itercast.eval.progress import progress_bar
from itercast.eval.tables import print_tables
from itercast.extras.campaign.catalogue import catalogue, step_us, steps
from itercast.extras.programs import run_program
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.family import Point

CallTimes = Mapping[tuple[str, Point], float]  # us of a step, by family and parameters
ALL = "all"  # families together


def inside(
    bundle: Bundle, gpu: Gpu, steps_us: Iterable[CallTimes]
) -> dict[str, tuple[float, float]]:
    """By family and for all: its share of the steps' time, and the part of that in the envelope.

    Every step counts as much as any other. A family without a model has nothing in the envelope.
    """
    time_frac, inside_frac = defaultdict[str, float](float), defaultdict[str, float](float)
    for calls_us in steps_us:
        step_total_us = sum(calls_us.values())
        for name in {name for name, _ in calls_us}:
            points = [p for family, p in calls_us if family == name]
            share = np.array([calls_us[name, p] for p in points]) / step_total_us
            rows = pd.DataFrame([asdict(p) for p in points]).assign(gpu=gpu.name, cache="warm")
            priced = bundle.price(name, rows, {gpu.name: gpu})
            in_envelope = priced["in_envelope"].to_numpy(dtype=bool)
            for key in (name, ALL):
                time_frac[key] += float(share.sum())
                inside_frac[key] += float(share[in_envelope].sum())
    order = sorted(time_frac, key=lambda key: -time_frac[key])
    return {
        key: (time_frac[key] / time_frac[ALL], inside_frac[key] / time_frac[key]) for key in order
    }


def main(
    bundle: Annotated[Path, typer.Option(help="bundle that is asked")] = SHIPPED,
    gpu: Annotated[str, typer.Option(help="GPU whose roofline gives times")] = "h100-sxm-80gb",
    models: Annotated[int, typer.Option(help="held-out models, at most")] = 50,
) -> None:
    """Print how much of the time of held-out models lies inside a bundle's envelope."""
    held_out = [model for model in catalogue() if model.held_out][:models]
    device, drawn = load_gpu(gpu), [*steps(held_out, seed=0)]
    with progress_bar() as bar:
        tracked = bar.track(drawn, description="capture")
        steps_us = [
            step_us(model.calls(batch, seq, dtype), device) for model, batch, seq, dtype in tracked
        ]
    table = Table("family", "share of the time %", "of that inside the envelope %")
    table.title = f"{len(held_out)} held-out models, {len(drawn)} steps, {gpu}"
    for name, (share, covered) in inside(Bundle.load(bundle), device, steps_us).items():
        table.add_row(name, f"{100 * share:.1f}", f"{100 * covered:.1f}")
    print_tables(table)


if __name__ == "__main__":
    run_program(main)
