"""Finds the kernels that each of several runs launches, in the trace of one profiler session."""

from __future__ import annotations

import json
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.microbench.timing.nvml import Reading

Json = Any  # a value of a trace
MARK = "itercast run "
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
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
    runs: Sequence[Callable[[], object]],
    wait: Callable[[], None],
    first: Callable[[], object],
) -> dict[str, Json]:
    """Profile runs; returns a Chrome trace in which run n is inside an annotation ``MARK`` n.

    Each run is preceded by the same run without annotation, so that caches are warm. ``first``
    launches a tiny kernel, at the beginning, where the profiler may lose kernels.

    After a session CUPTI stays attached and slows all later launches, unless TEARDOWN_CUPTI is "1"
    (CuptiActivityApi.cpp of https://github.com/pytorch/kineto). A thread then detaches it during
    the next CUDA calls; calls of ``wait`` let it do so.
    """
    from torch import profiler  # lazy: traces are read where torch is absent

    os.environ["TEARDOWN_CUPTI"] = "1"
    kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=kinds) as session:
        for _ in range(LEADING_LAUNCHES):
            first()
        for number, run in enumerate(runs):
            run()
            with profiler.record_function(f"{MARK}{number}"):
                run()
            wait()
    until_s = time.monotonic() + DETACH_S
    while time.monotonic() < until_s:
        wait()
        time.sleep(DETACH_S / 10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        found: dict[str, Json] = json.loads(path.read_text(errors="replace"))
    return found


def kernels_by_run(trace: Mapping[str, Json], runs: int) -> list[list[tuple[str, float]]]:
    """(name, duration in us) of the kernels, copies and fills of each run, in launch order.

    A kernel belongs to the run during which the host launched it, on any thread. Where the trace
    lacks a kernel that a run launched (CUPTI lost records), the run's list is empty.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(MARK)))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    starts = [begin for begin, _, _ in marks]
    launched = {
        _correlation(e): e["ts"]
        for e in events
        if e.get("cat") in LAUNCHES and _correlation(e) is not None
    }
    found: list[list[tuple[float, str, float]]] = [[] for _ in range(runs)]

    def run_at(ts: float) -> int | None:
        index = bisect_right(starts, ts) - 1
        return marks[index][2] if index >= 0 and ts <= marks[index][1] else None

    seen = set()
    for event in events:
        correlation = _correlation(event)
        at = launched.get(correlation)
        if event.get("cat") not in KERNELS or at is None:
            continue
        seen.add(correlation)
        if (run := run_at(at)) is not None:
            found[run].append((at, event["name"], float(event["dur"])))
    lost = {run_at(e["ts"]) for e in events if _launches(e) and _correlation(e) not in seen}
    return [
        [] if number in lost else [(name, us) for _, name, us in sorted(run)]
        for number, run in enumerate(found)
    ]


def _launches(event: Mapping[str, Json]) -> bool:
    """Whether an event is a call of the CUDA runtime that launches a kernel."""
    return event.get("cat") == "cuda_runtime" and "LaunchKernel" in event["name"]


def _correlation(event: Mapping[str, Json]) -> Json:
    return event.get("args", {}).get("correlation")


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
    one = rows[(rows["cache"] == "warm") & (rows["kernel_count"] == 1) & rows["time_us"].notna()]
    for doubtful in ("starved", "synchronises"):
        if doubtful in one:
            one = one[one[doubtful].ne(True)]
    kernel_us = one["kernel_us"].to_numpy(float)
    excess_us = one["time_us"].to_numpy(float) - kernel_us
    slack_us = RESOLUTION_US + NOISE_FRAC * kernel_us
    off = (excess_us < -slack_us) | (excess_us > EVENTS_US + slack_us)
    return len(one), int(np.count_nonzero(off))
