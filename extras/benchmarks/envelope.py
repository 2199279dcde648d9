"""How much of the time of models that nobody swept lies inside what was measured, by op family.

``python -m itercast.extras.benchmarks.envelope`` captures a step of each held-out model of the
catalogue (``itercast.extras.campaign.catalogue``) and asks a bundle which of its calls are in its
envelope.
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
ALL = "all"


def inside(
    bundle: Bundle, gpu: Gpu, of_steps: Iterable[CallTimes]
) -> dict[str, tuple[float, float]]:
    """By family and for all: its share of the steps' time, and the part of that in the envelope.

    Every step counts as much as any other. A family without a model has nothing in the envelope.
    """
    time, known = defaultdict[str, float](float), defaultdict[str, float](float)
    for calls_us in of_steps:
        total = sum(calls_us.values())
        for name in {name for name, _ in calls_us}:
            mine = {p: us / total for (of, p), us in calls_us.items() if of == name}
            rows = pd.DataFrame([asdict(p) for p in mine]).assign(gpu=gpu.name, cache="warm")
            seen = bundle.price(name, rows, {gpu.name: gpu})["in_envelope"].to_numpy(dtype=bool)
            share = np.array(list(mine.values()))
            for key in (name, ALL):
                time[key] += float(share.sum())
                known[key] += float(share[seen].sum())
    order = sorted(time, key=lambda key: -time[key])
    return {key: (time[key] / time[ALL], known[key] / time[key]) for key in order}


def main(
    bundle: Annotated[Path, typer.Option(help="bundle that is asked")] = SHIPPED,
    gpu: Annotated[str, typer.Option(help="GPU whose roofline gives times")] = "h100-sxm-80gb",
    models: Annotated[int, typer.Option(help="held-out models, at most")] = 50,
) -> None:
    """Print how much of the time of held-out models lies inside a bundle's envelope."""
    held = [model for model in catalogue() if model.held_out][:models]
    device, some = load_gpu(gpu), [*steps(held, seed=0)]
    with progress_bar() as bar:
        tracked = bar.track(some, description="capture")
        found = [
            step_us(model.calls(batch, seq, dtype), device) for model, batch, seq, dtype in tracked
        ]
    table = Table("family", "share of the time %", "of that inside the envelope %")
    table.title = f"{len(held)} held-out models, {len(some)} steps, {gpu}"
    for name, (share, known) in inside(Bundle.load(bundle), device, found).items():
        table.add_row(name, f"{100 * share:.1f}", f"{100 * known:.1f}")
    print_tables(table)


if __name__ == "__main__":
    run_program(main)
