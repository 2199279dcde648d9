"""Fits how fast a host runs Python and launches ops, from measured steps.

Where the host's time of forward and backward was measured, as in rows of ``itercast collect``, both
numbers of a host come from it, whatever sets the pace of these steps:

    time of a step = slowdown * events of the reference host + launch_us * launches

Else all that the host does is ``slowdown`` times as slow as on the reference host, so that half of
the forecasts are too slow; the steps must be limited by launches, not by kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import StepCapture
from itercast.compose.target import Target, forecast_step
from itercast.microbench.hardware.host import HostMachine, scaled_host

SLOWDOWNS = (0.2, 40.0)  # no assumption: the range that is searched
PACE_SET = 0.01  # no assumption: a tolerance, in log time
HALVINGS = 10  # of that interval in log; leaves half a percent
MIN_TIMED = 3  # steps whose host times suffice for two numbers
NOTHING = 1e-9  # no assumption: of a host that does only the other thing
QUEUE: int = assumed(__file__, "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step: its time, its capture, and where it ran.

    ``phases_us``: the host's time of forward, loss and backward, None where it was not measured.
    ``exposed_us``: the part of the step in which compute waited for messages, ``peak_bytes``: of
    tensors, as torch's allocator counts them; both None where they were not measured.
    """

    label: str
    time_us: float
    step: StepCapture
    target: Target
    phases_us: float | None = None
    exposed_us: float | None = None
    peak_bytes: float | None = None

    def log_error(self, host: HostMachine) -> float:
        """log(forecast / measured) on a host."""
        found = forecast_step(self.step, replace(self.target, host=host))
        return float(np.log(found.iteration_us / self.time_us))

    def host_us(self, host: HostMachine) -> float:
        """Host time of forward, loss and backward on a host that runs ahead of the GPU."""
        layers = replace(self.target, host=host).priced(self.step).layers
        return sum(
            layer.layer.count * (layer.forward_work.host_us + layer.backward_work.host_us)
            for layer in layers
        )

    @property
    def runs_ahead(self) -> bool:
        """Whether the host ran forward and backward without waiting for the GPU.

        No op made it wait, and all kernels fit into the queue, or took less time than the host.
        """
        layers = self.target.priced(self.step).layers
        ops = [(x.layer.count, op) for x in layers for op in (*x.forward, *x.backward)]
        queued = sum(count * op.kernels for count, op in ops)
        gpu_us = sum(count * op.duration_us for count, op in ops)
        never_full = queued < QUEUE or gpu_us < (self.phases_us or 0.0)
        return never_full and not any(op.waits for _, op in ops)


def fit_host(
    name: str, rows: Sequence[MeasuredStep], *, source: str, cpu: str = "", fitted_on: str = ""
) -> HostMachine:
    """Finds a host's two numbers by least squares, or its slowdown by bisection (see above).

    ValueError where no host time was measured and the rows are limited by the GPU rather than the
    host: no slowdown makes their forecasts right.
    """
    if two := _from_phases(rows):
        slowdown, launch_us = (round(number, 3) for number in two)
        return HostMachine(
            name=name,
            slowdown=slowdown,
            launch_us=launch_us,
            cpu=cpu,
            source=source,
            fitted_on=fitted_on,
        )
    low, high = np.log(SLOWDOWNS)
    fastest = scaled_host(name, SLOWDOWNS[0], source=source)
    if np.median([row.log_error(fastest) for row in rows]) > -PACE_SET:
        raise ValueError(
            f"host {name!r}: the GPU sets the pace of these {len(rows)} rows, so the host's speed "
            "does not show; measure smaller batches"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        host = scaled_host(name, float(np.exp(middle)), source=source)
        too_slow = np.median([row.log_error(host) for row in rows]) > 0
        low, high = (low, middle) if too_slow else (middle, high)
    slowdown = round(float(np.exp((low + high) / 2)), 2)
    return scaled_host(name, slowdown, cpu=cpu, source=source, fitted_on=fitted_on)


def _from_phases(rows: Sequence[MeasuredStep]) -> tuple[float, float] | None:
    """Slowdown and launch in us with the least relative errors; None where too few were timed."""
    timed = [(row, row.phases_us) for row in rows if row.phases_us and row.runs_ahead]
    if len(timed) < MIN_TIMED:
        return None
    alone = (
        HostMachine(name="events", slowdown=1.0, launch_us=NOTHING, source="by hand"),
        HostMachine(name="launches", slowdown=NOTHING, launch_us=1.0, source="by hand"),
    )
    share = np.array([[row.host_us(one) / us for one in alone] for row, us in timed])
    slowdown, launch_us = np.linalg.lstsq(share, np.ones(len(timed)))[0]
    return (float(slowdown), float(launch_us)) if min(slowdown, launch_us) > 0 else None
