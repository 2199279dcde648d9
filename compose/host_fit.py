"""Fits how slow a host launches ops, from measured steps whose time is launches, not kernels.

The slowdown (1: the reference host) is the one at which half of the forecasts are too slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from itercast.compose.target import Target, forecast_step
from itercast.microbench.hardware.host import HostMachine, scaled_host
from itercast.microbench.opcall import StepCapture

SLOWDOWNS = (0.2, 40.0)  # no assumption: the range that is searched
HALVINGS = 10  # of that interval in log; leaves half a percent


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step limited by launches: its measured time, its capture, and where it ran."""

    label: str
    time_us: float
    step: StepCapture
    target: Target

    def log_error(self, host: HostMachine) -> float:
        """log(forecast / measured) on a host."""
        found = forecast_step(self.step, replace(self.target, host=host))
        return float(np.log(found.iteration_us / self.time_us))


def fit_host(
    name: str, rows: Sequence[MeasuredStep], *, source: str, cpu: str = "", fitted_on: str = ""
) -> HostMachine:
    """Finds the slowdown at which the median signed error of the rows is 0, by bisection.

    ValueError where the rows are limited by the GPU rather than the host: no slowdown makes their
    forecasts right.
    """
    low, high = np.log(SLOWDOWNS)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        host = scaled_host(name, float(np.exp(middle)), source=source)
        too_slow = np.median([row.log_error(host) for row in rows]) > 0
        low, high = (low, middle) if too_slow else (middle, high)
    slowdown = round(float(np.exp((low + high) / 2)), 2)
    if slowdown <= 1.05 * SLOWDOWNS[0]:  # no assumption: a tolerance
        raise ValueError(
            f"host {name!r}: the GPU sets the pace of these {len(rows)} rows, so the host's speed "
            "does not show; measure smaller batches"
        )
    return scaled_host(name, slowdown, cpu=cpu, source=source, fitted_on=fitted_on)
