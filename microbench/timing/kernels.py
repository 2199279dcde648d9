"""Finds the kernels that each of several runs launches, in the trace of one profiler session."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from itercast.microbench.timing.nvml import Reading
from itercast.microbench.timing.traces import Span, Trace, record

MARK = "itercast run "
NAME_LENGTH = 120  # of a kernel; template arguments can have thousands of letters
NAMES = 8  # of kernels in a row of the dataset
# Before the runs, as CUPTI may lose the first kernels of a session:
# https://github.com/pytorch/pytorch/issues/192021
LEADING_LAUNCHES = 64
DETACH_S = 0.2  # for CUPTI to detach after a session
EVENTS_US = 2.0  # most that events may time more than the kernel between them takes
RESOLUTION_US = 0.5  # of CUDA events: cudaEventElapsedTime
NOISE_FRAC = 0.03  # of a kernel's time between runs, as clocks change


def profile(
    runs: Sequence[Callable[[], object]], wait: Callable[[], None], first: Callable[[], object]
) -> Trace:
    """Profile runs; returns a trace in which run n is inside an annotation ``MARK`` n.

    Each run is preceded by the same run without annotation, so that caches are warm. ``first``
    launches a tiny kernel, at the beginning, where the profiler may lose kernels.

    After a session CUPTI stays attached and slows all later launches, unless TEARDOWN_CUPTI is "1"
    (CuptiActivityApi.cpp of https://github.com/pytorch/kineto). A thread then detaches it during
    the next CUDA calls; calls of ``wait`` let it do so.
    """
    from torch import profiler  # lazy: traces are read where torch is absent

    def run_all() -> None:
        for _ in range(LEADING_LAUNCHES):
            first()
        for number, run in enumerate(runs):
            run()
            with profiler.record_function(f"{MARK}{number}"):
                run()
            wait()

    os.environ["TEARDOWN_CUPTI"] = "1"
    trace = record(run_all, on_gpu=True)
    until_s = time.monotonic() + DETACH_S
    while time.monotonic() < until_s:
        wait()
        time.sleep(DETACH_S / 10)
    return trace


def kernels_by_run(trace: Trace, runs: int) -> list[list[tuple[str, float]]]:
    """(name, duration in us) of the kernels, copies and fills of each run, in launch order.

    A kernel belongs to the run during which the host launched it, on any thread. Where the trace
    lacks a kernel that a run launched (CUPTI lost records), the run's list is empty.
    """
    marks = sorted(
        (op.start_us, op.start_us + op.duration_us, int(op.name.removeprefix(MARK)))
        for op in trace.ops
        if op.name.startswith(MARK)
    )

    def run_of(launch: Span) -> int | None:
        index = bisect_right(marks, launch.start_us, key=lambda mark: mark[0]) - 1
        return marks[index][2] if index >= 0 and launch.start_us <= marks[index][1] else None

    launched: list[list[tuple[float, str, float]]] = [[] for _ in range(runs)]
    for kernel in trace.kernels:
        launch = trace.launches.get(kernel.correlation)
        if launch is not None and (number := run_of(launch)) is not None:
            launched[number].append((launch.start_us, kernel.name, kernel.duration_us))
    recorded = {kernel.correlation for kernel in trace.kernels}
    unrecorded = [
        launch for correlation, launch in trace.launches.items() if correlation not in recorded
    ]
    # of the CUDA runtime; its other calls launch no kernel
    lost = {run_of(launch) for launch in unrecorded if launch.name.startswith("cudaLaunchKernel")}
    return [
        [] if number in lost else [(name, us) for _, name, us in sorted(run)]
        for number, run in enumerate(launched)
    ]


def kernel_facts(kernels: Sequence[tuple[str, float]]) -> Reading:
    """Returns columns of a row: distinct kernel names in launch order, number, summed times."""
    if not kernels:
        return {}
    names = list(dict.fromkeys(name[:NAME_LENGTH] for name, _ in kernels))
    return {
        "kernels": "; ".join(names[:NAMES]),
        "kernel_count": len(kernels),
        "kernel_us": sum(us for _, us in kernels),
    }


def timing_disagreement(rows: pd.DataFrame) -> tuple[int, int]:
    """Compare times by events with kernel times by the profiler: (rows compared, disagreeing).

    Compared are warm rows of ops with one kernel. A row disagrees where the time by events, without
    their own overhead, is not within kernel time - slack .. kernel time + 2 us + slack, with
    slack = 0.5 us + 3 % of the kernel time.
    """
    needed = {"cache", "time_us", "kernel_us", "kernel_count"}
    if not needed <= set(rows.columns):
        return 0, 0
    single = rows[(rows["cache"] == "warm") & (rows["kernel_count"] == 1) & rows["time_us"].notna()]
    for doubtful in ("starved", "synchronises"):
        if doubtful in single:
            single = single[single[doubtful].ne(True)]
    kernel_us = single["kernel_us"].to_numpy(float)
    excess_us = single["time_us"].to_numpy(float) - kernel_us
    slack_us = RESOLUTION_US + NOISE_FRAC * kernel_us
    disagrees = (excess_us < -slack_us) | (excess_us > EVENTS_US + slack_us)
    return len(single), int(np.count_nonzero(disagrees))
