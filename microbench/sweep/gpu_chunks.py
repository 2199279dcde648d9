"""Measures chunks of points on a GPU, which runs asynchronously to the host.

All points of a chunk are built. Then each is run once untimed, launched three times to time the
host, and sampled for its device time; at last all are profiled in one session. After each step of a
point the host waits for the device, so that an error is raised at the point that caused it.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import pandas as pd

from itercast.microbench.ops import families
from itercast.microbench.ops.family import Workload
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import Row
from itercast.microbench.sweep.rows import failure, one_line
from itercast.microbench.sweep.scheduler import Chosen, Sweep
from itercast.microbench.sweep.under_way import PROFILER, UnderWay
from itercast.microbench.timing.clock import CallCost, summarise
from itercast.microbench.timing.cuda_device import CudaDevice, Launched
from itercast.microbench.timing.host_timing import host_timing, launch_us
from itercast.microbench.timing.kernels import kernel_facts, timing_disagreement
from itercast.microbench.timing.nvml import combined, is_throttled
from itercast.microbench.timing.references import reference_times, unstarved

log = logging.getLogger(__name__)
CHUNK_POINTS = 96
CHUNK_S = 20.0  # of a chunk; after it no further point is begun
CHUNK_ARENA_FRAC = 0.4  # of the arena, for operands of a chunk; results need memory, too
PROFILE_EVERY = 4  # chunks; a profiler session takes a second and slows launches
ANCHOR = Gemm(m=2048, n=2048, k=2048, dtype="bf16")
SAMPLING_US = 6000.0  # for all samples of a point and cache state
SAMPLES = (3, 10)
LONG_RUN_US = 50_000.0  # longer points are launched once and sampled twice
LONG_SAMPLES = 2
LAUNCHES = 3
BLOCKED_US = (200.0, 5000.0)  # device sleeps that show whether the host waits for the device
MIN_DEVICE_US = 0.5  # resolution of CUDA events: cudaEventElapsedTime
CONDITIONS_EVERY = 8  # points, between two readings of clocks and power


class Broken(Exception):
    """Raised on a sticky CUDA error, after which the process cannot use the device."""


class GpuBench:
    """Measures chunks on a GPU, one in four of them with a profiler."""

    points, seconds = CHUNK_POINTS, CHUNK_S

    def __init__(self, sweep: Sweep, under_way: UnderWay, device: CudaDevice) -> None:
        self.sweep, self.under_way, self.device = sweep, under_way, device
        # A fixed product, timed in every chunk to show drift of the GPU's speed.
        self.anchor = families()["gemm"].build(ANCHOR, device.name).run
        self.call_cost = CallCost(device.wait)
        on_host = all(families()[n].on_host for n in sweep.order.families)
        # a profiler would slow later host times
        self.profiles = not on_host and under_way.died_at != PROFILER
        self.chunks = 0
        self.broken = False  # by the profiler

    def measure(
        self, chosen: Sequence[Chosen], until_s: float
    ) -> tuple[list[Row], list[list[Chosen]]]:
        """Rows of a chunk, and chunks of points that memory or time did not suffice for.

        Broken after a sticky error. Python collects its garbage between chunks only, so that it
        delays no launch.
        """
        chunk = Chunk(self, chosen, until_s)
        several = len(chosen) > 1  # a profiler session would cost more than a point alone
        profiled = self.profiles and several and self.chunks % PROFILE_EVERY == 0
        gc.disable()
        try:
            rows = chunk.measure(self.sweep, profiled)
        finally:
            gc.enable()
        self.chunks += several
        self.broken = chunk.lost
        _log_chunk(rows, time.monotonic() - chunk.begin_s)
        left = [chunk.rest, *([point] for point in chunk.later)]
        del chunk
        gc.collect()
        return rows, left


def _log_chunk(rows: list[Row], wall_s: float) -> None:
    """Log one line on a chunk: rows, seconds, whether events and profiler agree."""
    checked, disagreeing = timing_disagreement(pd.DataFrame(rows))
    launch_us = rows[0].get("tiny_launch_us", math.nan) if rows else math.nan
    log.info(
        "%d rows in %.1f s; of %d kernels timed by events and profiler %d disagree; "
        "a launch takes %.1f us",
        len(rows),
        wall_s,
        checked,
        disagreeing,
        launch_us,
    )


@dataclass(slots=True, kw_only=True)
class Measured:
    """What has been measured of one point of a chunk.

    ``failed``: columns status and reason, if it failed. ``device_us``: shortest time of a run on an
    idle device, launch included. ``synchronises``: the op makes the host wait for the device.
    """

    chosen: Chosen
    number: int
    workload: Workload | None = None
    failed: Row | None = None
    launches_us: list[float] = field(default_factory=list)
    baselines_us: list[float] = field(default_factory=list)
    device_us: float = math.inf
    synchronises: bool = False
    busy_s: float = 0.0  # time of the host on this point, waiting for the device included
    times_us: dict[str, list[float]] = field(default_factory=dict)  # samples by cache
    starved: dict[str, bool] = field(default_factory=dict)  # by cache: all samples starved
    facts: Row = field(default_factory=dict)


class Chunk:
    """Measures the points of one chunk."""

    def __init__(
        self, bench: GpuBench, chosen: Sequence[Chosen], until_s: float = math.inf
    ) -> None:
        """After ``until_s``, by time.monotonic(), no point but the first is begun."""
        self.bench, self.device = bench, bench.device
        self.begin_s, self.until_s = time.monotonic(), until_s
        self.points = [Measured(chosen=c, number=n) for n, c in enumerate(chosen)]
        self.readings: list[Row] = []
        self.later: list[Chosen] = []  # points that did not fit into memory beside others
        self.rest: list[Chosen] = []  # points that memory or time did not suffice for
        self.lost = False  # whether the profiler broke the device, after all were measured

    def measure(self, sweep: Sweep, profiled: bool = False) -> list[Row]:
        """Rows of all points but ``later`` and ``rest``; Broken after a sticky error."""
        before = self.device.conditions()
        self._build()
        self._each(self._first_run)
        for _ in range(LAUNCHES):  # one point after another, so that code is as cold as in a step
            self._each(self._launch)
        self._each(self._probe)
        self._each(self._sample, self.until_s)
        self.readings.append(self.device.conditions())
        shared = combined(self.readings) | self._references()
        if "energy_j" in before:
            shared["energy_j"] = self.readings[-1]["energy_j"] - before["energy_j"]
        if profiled and time.monotonic() < self.until_s:
            self._profile()
        return self._rows(sweep, shared, time.monotonic() - self.begin_s)

    def _each(self, step: Callable[[Measured], None], until_s: float = math.inf) -> None:
        """Do a step for all points that have not failed; leave those not begun by ``until_s``."""
        for index, point in enumerate(self.points):
            if index and time.monotonic() > until_s:
                self._leave(index)
                break
            if point.failed is None:
                self._try(point, partial(step, point))
        self.bench.under_way.note(None)

    def _leave(self, first: int) -> None:
        """Leave the points from this one on to another chunk."""
        self.rest = [p.chosen for p in self.points[first:] if p.failed is None] + self.rest
        self.points[first:] = [p for p in self.points[first:] if p.failed is not None]

    def _try(self, point: Measured, action: Callable[[], None]) -> None:
        """Do a step of a point and wait for the device; a failure is kept with its reason."""
        begin = time.monotonic()
        self.bench.under_way.note(point.chosen)
        try:
            self.device.settings(_dtype(point))
            action()
            self.device.wait()
        except Exception as exc:  # any failure becomes a row
            if self.device.broken():
                raise Broken(one_line(exc)) from exc
            point.failed = failure(exc)
        if point.failed is not None:
            point.workload = None
        if point.failed is not None and point.failed["status"] == "oom":
            self.device.reset()  # only now: the traceback kept the tensors alive
            if len(self.points) > 1:
                self.later.append(point.chosen)
        point.busy_s += time.monotonic() - begin

    def _build(self) -> None:
        """Build points until half of the time, or the memory for operands, is used up.

        The points after that are left to another chunk.
        """
        until_s = (self.begin_s + self.until_s) / 2
        for index, point in enumerate(self.points):
            full = self.device.allocated_bytes() > CHUNK_ARENA_FRAC * self.device.arena_bytes
            if index and (full or time.monotonic() > until_s):
                self._leave(index)
                break
            self._try(point, partial(self._build_one, point))

    def _build_one(self, point: Measured) -> None:
        point.workload = point.chosen.family.build(point.chosen.point, self.device.name)

    def _first_run(self, point: Measured) -> None:
        """Run once untimed: loads kernels and allocates memory."""
        _workload(point).run()

    def _launch(self, point: Measured) -> None:
        """Time the host's launch on an idle device, after a call that warms ``torch.ops.aten``."""
        if _is_host(point) or (point.launches_us and point.device_us > LONG_RUN_US):
            return
        workload = _workload(point)
        self.bench.call_cost.before[workload.through_aten]()
        launched = self.device.launch(workload.run)
        self.device.wait()
        point.launches_us.append(launched.host_us)
        point.device_us = min(point.device_us, self.device.elapsed_us(launched))
        if workload.baseline is not None:
            point.baselines_us.append(self.device.launch(workload.baseline).host_us)

    def _probe(self, point: Measured) -> None:
        """Find out whether the op makes the host wait for the device.

        Only where launching takes at least half as long as the device: then launch behind a sleep
        of the device. The host waits if launching takes longer than half of the sleep, twice.
        """
        if _is_host(point) or min(point.launches_us) < 0.5 * point.device_us:
            return
        least_us = min(point.launches_us)
        shortest_us, longest_us = BLOCKED_US
        behind_us = min(max(least_us, shortest_us), longest_us)

        def blocked() -> bool:
            launched = self.device.launch(_workload(point).run, behind_us)
            self.device.wait()
            return launched.host_us > least_us + 0.5 * behind_us

        point.synchronises = blocked() and blocked()

    def _sample(self, point: Measured) -> None:
        """Sample device times, cold and warm; for a host call, its host time."""
        if _is_host(point):
            point.facts = host_timing(_workload(point), self.device.wait)
            return
        low, high = SAMPLES
        repetitions = max(low, min(high, int(SAMPLING_US / max(point.device_us, 1.0))))
        if point.device_us > LONG_RUN_US:
            repetitions = LONG_SAMPLES
        for cache in ("cold", "warm"):
            queued = self._queue(point, cache == "cold", repetitions)
            if not point.number % CONDITIONS_EVERY:
                self.readings.append(self.device.conditions())
            self.device.wait()
            unstarved_samples = unstarved(queued)
            point.times_us[cache] = [self.device.elapsed_us(sample) for sample in unstarved_samples]
            point.starved[cache] = unstarved_samples[0].starved and not point.synchronises

    def _queue(self, point: Measured, cold: bool, repetitions: int) -> list[Launched]:
        """Queue samples until ``repetitions`` of them did not starve, at most twice as many.

        A sample starves if the device waits for the host; the sleep before samples then doubles.
        Ops that make the host wait get no sleep and no further samples.
        """
        host_us = 0.0 if point.synchronises else statistics.median(point.launches_us)
        queued: list[Launched] = []
        for _ in range(repetitions if point.synchronises else 2 * repetitions):
            queued.append(self.device.sample(_workload(point).run, cold, host_us))
            if queued[-1].starved:
                host_us *= 2
            if sum(not sample.starved for sample in queued) == repetitions:
                break
        return queued

    def _references(self) -> dict[str, float]:
        """Times of reference workloads in us, by column; Broken after a sticky error."""
        try:
            self.device.settings("fp32")
            return reference_times(self.device, self.bench.anchor)
        except Exception as exc:
            if self.device.broken():
                raise Broken(one_line(exc)) from exc
            raise

    def _profile(self) -> None:
        """Profile the kernels of all sampled points, each under the settings of its dtype."""
        sampled = [p for p in self.points if p.times_us and p.failed is None]

        def run(point: Measured) -> None:
            self.device.settings(_dtype(point))
            _workload(point).run()

        self.bench.under_way.profiling()
        kernels_by_point = self.device.kernels([partial(run, p) for p in sampled])
        self.lost = self.device.broken()
        for point, kernels in zip(sampled, kernels_by_point, strict=True):
            point.facts = kernel_facts(kernels)

    def _rows(self, sweep: Sweep, shared: Row, wall_s: float) -> list[Row]:
        """Rows of all points; ``cost_s``: a point's share of the chunk's time, by host time."""
        status = "throttled" if is_throttled(shared) else "ok"
        later = {id(chosen) for chosen in self.later}
        points = [p for p in self.points if id(p.chosen) not in later]
        busy_s = sum(p.busy_s + 1e-4 for p in self.points)
        rows: list[Row] = []
        for point in points:
            rows_of_point = self._point_rows(sweep, point, {**shared, "status": status})
            cost_s = wall_s * (point.busy_s + 1e-4) / busy_s
            rows += [{**row, "cost_s": cost_s / len(rows_of_point)} for row in rows_of_point]
        return rows

    def _point_rows(self, sweep: Sweep, point: Measured, shared: Row) -> list[Row]:
        """Rows of one point: one row for a failure or a host call, else a cold and a warm row."""
        if point.failed is not None:
            return [sweep.row(point.chosen, "warm", point.failed)]
        if _is_host(point):
            columns = {**shared, "timer": "with_launch", **point.facts}
            return [sweep.row(point.chosen, "warm", columns)]
        workload, cost = _workload(point), self.bench.call_cost
        launched_us = launch_us(workload, point.launches_us, point.baselines_us, cost)
        columns = {
            **shared,
            **point.facts,
            "synchronises": point.synchronises,
            "launch_us": launched_us,
        }
        rows = []
        for cache, times_us in point.times_us.items():
            runs_us = [max(us - shared["empty_us"], MIN_DEVICE_US) for us in times_us]
            timing = asdict(summarise([us / workload.calls for us in runs_us]))
            timing["starved"] = point.starved[cache]
            rows.append(sweep.row(point.chosen, cache, columns | timing))
        return rows


def _dtype(point: Measured) -> str:
    return getattr(point.chosen.point, "dtype", "fp32")


def _is_host(point: Measured) -> bool:
    """Whether the point is a call on the host, such as a launch, which no kernel follows."""
    return point.chosen.family.on_host


def _workload(point: Measured) -> Workload:
    """The point's workload; ValueError where it was not built."""
    if point.workload is None:
        raise ValueError("the point was not built")
    return point.workload
