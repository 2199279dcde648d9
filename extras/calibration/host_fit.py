"""Fits how fast a host runs Python and launches ops, from measured steps or timed events.

Where the host's time of forward and backward was measured, as in rows of ``itercast collect``, both
numbers of a host come from it, whatever sets the pace of these steps:

    time of a step = slowdown * events of the reference host + launch_us * launches

Else one ``slowdown`` holds for all that the host does: the one with which half of the forecasts are
too slow. The steps must then be limited by launches, not by kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from itercast.capture.base.assumptions import assumed
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.target import forecast_step
from itercast.microbench.hardware.host import (
    EVENT_US,
    LAUNCH_EVENT,
    REFERENCE,
    USUAL,
    WARM_CALL,
    HostMachine,
)

SLOWDOWNS = (0.2, 40.0)  # no assumption: the range that is searched
GPU_BOUND = 0.01  # no assumption: forecasts shorter by less, in log time, show no host
HALVINGS = 10  # of that interval in log; leaves half a percent
MIN_TIMED = 3  # steps whose host times suffice for two numbers
NO_TIME = 1e-9  # no assumption: instead of 0, which a host does not take
QUEUE: int = assumed(__file__, "queue")


def log_error(measured: MeasuredStep, host: HostMachine) -> float:
    """log(forecast / measured) of a step on a host."""
    forecast = forecast_step(measured.step, replace(measured.target, host=host))
    return float(np.log(forecast.iteration_us / measured.time_us))


def host_us(measured: MeasuredStep, host: HostMachine) -> float:
    """Host time of forward, loss and backward on a host that runs ahead of the GPU."""
    layers = replace(measured.target, host=host).priced(measured.step).layers
    return sum(
        layer.layer.count * (layer.forward_work.host_us + layer.backward_work.host_us)
        for layer in layers
    )


def runs_ahead(measured: MeasuredStep) -> bool:
    """Whether the host ran forward and backward without waiting for the GPU.

    No op made it wait, and all kernels fit into the queue, or took less time than the host.
    """
    layers = measured.target.priced(measured.step).layers
    ops = [(x.layer.count, op) for x in layers for op in (*x.forward, *x.backward)]
    kernels = sum(count * op.kernels for count, op in ops)
    gpu_us = sum(count * op.duration_us for count, op in ops)
    never_full = kernels < QUEUE or gpu_us < (measured.phases_us or 0.0)
    return never_full and not any(op.waits for _, op in ops)


def fit_host(
    name: str, rows: Sequence[MeasuredStep], *, source: str, cpu: str = "", fitted_on: str = ""
) -> HostMachine:
    """Finds a host's two numbers by least squares, or its slowdown by bisection (see above).

    ValueError where no host time was measured and the rows are limited by the GPU rather than the
    host: no slowdown makes their forecasts right.
    """
    if fitted := _fit_to_phases(rows):
        slowdown, launch_us = fitted
        return HostMachine(
            name=name,
            slowdown=round(slowdown, 3),
            launch_us=round(launch_us, 3),
            cpu=cpu,
            source=source,
            fitted_on=fitted_on,
        )
    low, high = np.log(SLOWDOWNS)
    fastest = scaled_host(name, SLOWDOWNS[0], source=source)
    if np.median([log_error(row, fastest) for row in rows]) > -GPU_BOUND:
        raise ValueError(
            f"host {name!r}: the GPU sets the pace of these {len(rows)} rows, so the host's speed "
            "does not show; measure smaller batches"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        host = scaled_host(name, float(np.exp(middle)), source=source)
        too_slow = np.median([log_error(row, host) for row in rows]) > 0
        low, high = (low, middle) if too_slow else (middle, high)
    slowdown = round(float(np.exp((low + high) / 2)), 2)
    return scaled_host(name, slowdown, cpu=cpu, source=source, fitted_on=fitted_on)


def _fit_to_phases(rows: Sequence[MeasuredStep]) -> tuple[float, float] | None:
    """Slowdown and us per launch with the least relative errors; None where too few were timed.

    Least squares of slowdown * events_us / measured_us + launch_us * launches / measured_us = 1.
    """
    timed = [(row, row.phases_us) for row in rows if row.phases_us and runs_ahead(row)]
    if len(timed) < MIN_TIMED:
        return None
    events = HostMachine(name="events", slowdown=1.0, launch_us=NO_TIME, source="by hand")
    launches = HostMachine(name="launches", slowdown=NO_TIME, launch_us=1.0, source="by hand")
    terms = [[host_us(row, events) / us, host_us(row, launches) / us] for row, us in timed]
    slowdown, launch_us = np.linalg.lstsq(np.array(terms), np.ones(len(timed)))[0]
    return (float(slowdown), float(launch_us)) if min(slowdown, launch_us) > 0 else None


def host_of_events(rows: pd.DataFrame, name: str, source: str) -> HostMachine | None:
    """Derives a host from measured times of Python and autograd events (rows of family ``host``).

    ``slowdown`` is the median over events of the measured time / the reference host's;
    ``launch_us`` the median time of a launch. None where no such row was measured beside a GPU.
    """
    rows = rows[rows["time_us"] > 0]
    rows = rows[rows["status"] == "ok"] if "status" in rows else rows
    events = rows[rows["family"] == "host"]
    if len(events):
        events = events[events["op"].map(lambda op: op != "launch" and EVENT_US.get(op, 0.0) > 0)]
    if not len(events):
        return None
    tensors = events["tensors"].fillna(1) if "tensors" in events else np.ones(len(events))
    pairs = zip(events["op"], tensors, strict=True)
    reference_us = [REFERENCE.event_us(str(op), int(n)) for op, n in pairs]
    slowdown = float((events["time_us"] / reference_us).median())
    launches_us = _launches_us(rows)
    launch_us = slowdown * REFERENCE.launch_us
    if len(launches_us):
        launch_us = float(np.median(launches_us))
    return HostMachine(
        name=name, slowdown=round(slowdown, 3), launch_us=round(launch_us, 3), source=source
    )


def _launches_us(rows: pd.DataFrame) -> np.ndarray:
    """Host times in us of launching a pointwise op in a training step, from two kinds of rows.

    Rows of the event ``launch`` are of many ops, LAUNCH_EVENT times a pointwise op's on average.
    ``launch_us`` of pointwise ops was timed in a sweep; in a step it is WARM_CALL times as long.
    Cold rows repeat the launch of their warm row and are left out.
    """
    events = rows.loc[(rows["family"] == "host") & (rows["op"] == "launch"), "time_us"]
    parts = [events / LAUNCH_EVENT]
    if "launch_us" in rows:
        calls = rows[(rows["launch_us"] > 0) & (rows["family"] == "elementwise")]
        calls = calls[calls["cache"] != "cold"] if "cache" in calls else calls
        parts.append(WARM_CALL * calls["launch_us"])
    launches: np.ndarray = pd.concat(parts).to_numpy(dtype=float)
    return launches


def scaled_host(name: str, slowdown: float, **facts: Any) -> HostMachine:
    """Makes a host that is ``slowdown`` times as slow as the reference host in all it does.

    Launches and Python events take ``slowdown`` times as long. ``facts`` are further fields.
    """
    launch_us = round(slowdown * EVENT_US["launch"], 3)
    return HostMachine(name=name, slowdown=slowdown, launch_us=launch_us, **facts)


def check_host_file(path: Path) -> str:
    """Returns the name of the host that a file is written for; ValueError if it cannot be one."""
    if path.suffix not in {".yaml", ".yml"} or path.stem in (USUAL, REFERENCE.name):
        wanted = f"NAME.yaml, with a name other than {USUAL} and {REFERENCE.name}"
        raise ValueError(f"host file {str(path)!r}: allowed is {wanted}")
    return path.stem


def host_yaml(host: HostMachine) -> str:
    """The text of a host file; the name is the file's."""
    facts = {f.name: getattr(host, f.name) for f in fields(host) if f.name != "name"}
    return yaml.safe_dump(facts, sort_keys=False, width=100)
