"""Measures how long forecasts of many shardings take.

`python -m itercast.extras.recommenders.scale` prints it.
"""

from __future__ import annotations

import time

import numpy as np

from itercast.extras.benchmarks.speed import fresh_folder, print_table
from itercast.extras.processes import in_new_process
from itercast.extras.programs import run_program

TABLES, SHARDINGS, TOGETHER = 64, 1000, 10  # forecast so many at once


def shardings_s() -> float:
    """Seconds that forecasts of SHARDINGS shardings of many tables take, once ops are priced."""
    from itercast.compose.target import find_target
    from itercast.extras.recommenders.sharded_model import RankingModel, Table
    from itercast.extras.recommenders.sharding.forecast import Forecaster
    from itercast.extras.recommenders.sharding.propose import random_sharding
    from itercast.learners.bundle import SHIPPED_CPU

    rng = np.random.default_rng(0)
    tables = (
        Table(name=f"t{i}", rows=1000 * (i + 1), dim=16, pooling=20 + i % 40) for i in range(TABLES)
    )
    model = RankingModel(batch=256, tables=tuple(tables), bottom=(128, 64), top=(128, 64))
    forecaster = Forecaster(model, find_target("cpu", "dp=2", SHIPPED_CPU), 2)
    forecaster.forecast(random_sharding(rng, model, 2))
    start = time.perf_counter()
    for _ in range(SHARDINGS // TOGETHER):
        forecaster.forecasts([random_sharding(rng, model, 2) for _ in range(TOGETHER)])
    return time.perf_counter() - start


def main() -> None:
    """Print the time beside its target."""
    with fresh_folder():
        found = in_new_process(shardings_s)
    print_table(
        "scale", [(f"{SHARDINGS:,} shardings of {TABLES} tables, s", "<= 20", f"{found:.2f}")]
    )


if __name__ == "__main__":
    run_program(main)
