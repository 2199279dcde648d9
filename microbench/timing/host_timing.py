"""Host times on a GPU machine: of launching an op, and of calls without a kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from itercast.microbench.ops.family import Workload
from itercast.microbench.timing.clock import CallCost, summarise
from itercast.microbench.timing.cuda_device import Run
from itercast.microbench.timing.nvml import Reading

HOST_SAMPLES = 10
MIN_HOST_US = 0.5  # lower bound: no call from Python is faster


def launch_us(
    workload: Workload, launches_us: Sequence[float], baselines_us: Sequence[float], cost: CallCost
) -> float:
    """Host time in us to launch one call of an op, from the shortest run: other load only adds.

    ``launches_us`` are host times of whole runs on an idle device. The shortest baseline is
    subtracted, without one the cost of an empty timed call (and of ``torch.ops.aten``'s wrapper).
    """
    overhead_us = min(baselines_us) if baselines_us else cost.us(workload.through_aten)
    return max(min(launches_us) - overhead_us, MIN_HOST_US) / workload.calls


def host_timing(workload: Workload, wait: Callable[[], None]) -> Reading:
    """Host time of a call minus the baseline's, as columns; the device is idle before each run."""

    def once(run: Run) -> float:
        wait()
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3

    baseline_us = 0.0
    if workload.baseline is not None:
        baseline_us = statistics.median(once(workload.baseline) for _ in range(HOST_SAMPLES))
    times = [max(once(workload.run) - baseline_us, MIN_HOST_US) for _ in range(HOST_SAMPLES)]
    return asdict(summarise([us / workload.calls for us in times]))
