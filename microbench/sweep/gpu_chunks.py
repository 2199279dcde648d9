"""Points measured in chunks on a device that runs behind the host.

All points of a chunk are built, then each is run once, launched three times for what that costs the
host, and sampled; then all are profiled together. Between its steps the host waits for the device:
an error shows at the point that made it, and a note on disk says which one is under way.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from microbench.ops.family import Workload
from microbench.sweep.scheduler import Chosen, Sweep
from microbench.timing.clock import CallCost, summarise
from microbench.timing.device import Device, Launched, Run
from microbench.timing.host_timing import host_timing, launch_us
from microbench.timing.kernels import kernel_facts
from microbench.timing.nvml import combined, is_throttled
from microbench.timing.references import reference_times, unstarved

CHUNK_POINTS = 96
CHUNK_ARENA_FRAC = 0.4  # what a chunk's operands take at most; results need room, too
SAMPLING_US = 6000.0  # of a point and cache: what repetitions add up to at most
SAMPLES = (3, 10)
LONG_RUN_US = 50_000.0  # above: launched once, sampled twice
LONG_SAMPLES = 2
LAUNCHES = 3
BLOCKED_US = (200.0, 5000.0)  # sleeps of the device to find out whether the host waits for it
MIN_DEVICE_US = 0.5  # resolution of CUDA events: cudaEventElapsedTime
GLANCE_EVERY = 8  # points: clocks and power are read while these are sampled
PROFILING = -1  # noted in place of a point
OOM = ("out of memory", "can't allocate", "alloc_failed")
UNSUPPORTED = (
    "not implemented",
    "not supported",
    "only supported",
    "status_not_supported",  # cuBLAS and cuDNN
    "unable to find an engine",
    "no available kernel",  # of attention
)


class Broken(Exception):
    """The device answers no more (a sticky error): this process must end.

    ``culprit`` is the point that was run, where it is known.
    """

    def __init__(self, reason: str, culprit: Chosen | None = None) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all chunks of a worker are measured with.

    ``anchor`` is a fixed run, timed in every chunk to show drift. ``note`` writes down the number
    of the point under way, PROFILING, or None.
    """

    device: Device
    anchor: Run
    call_cost: CallCost
    note: Callable[[int | None], None]


@dataclass(slots=True, kw_only=True)
class Measured:
    """A point of a chunk on its way to rows; ``failed`` is a status and a reason.

    ``device_us``: the least time of a run launched on an idle device, the host's share included.
    ``synchronises``: the host waits for the device inside a run.
    """

    chosen: Chosen
    number: int
    workload: Workload | None = None
    failed: tuple[str, str] | None = None
    launches_us: list[float] = field(default_factory=list)
    baselines_us: list[float] = field(default_factory=list)
    device_us: float = math.inf
    synchronises: bool = False
    busy_s: float = 0.0  # of the host, waiting for the device included
    times_us: dict[str, list[float]] = field(default_factory=dict)  # samples by cache
    starved: dict[str, bool] = field(default_factory=dict)  # all of them
    facts: dict[str, Any] = field(default_factory=dict)


class Chunk:
    """The points of one chunk.

    After ``measure``: ``later`` are points that did not fit beside others, ``rest`` those for which
    memory or time was spent; ``lost`` says whether the device broke when all was measured.
    """

    def __init__(self, bench: Bench, chosen: Sequence[Chosen], until_s: float = math.inf) -> None:
        """No point is begun after ``until_s``, by time.monotonic(), but for the first."""
        self.bench, self.device = bench, bench.device
        self.begin_s, self.until_s = time.monotonic(), until_s
        self.points = [Measured(chosen=c, number=n) for n, c in enumerate(chosen)]
        self.readings: list[dict[str, Any]] = []
        self.later: list[Chosen] = []
        self.rest: list[Chosen] = []
        self.lost = False

    def measure(self, sweep: Sweep, profiled: bool = False) -> list[dict[str, Any]]:
        """Rows of all points but ``later`` and ``rest``; Broken where the device gave up."""
        before = self.device.conditions()
        self._build()
        self._each(self._first_run)
        for _ in range(LAUNCHES):  # in turns, as ops of a step are
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
        """A step for all points that have not failed; those it did not come to are left."""
        for at, point in enumerate(self.points):
            if at and time.monotonic() > until_s:
                self._leave(at)
                break
            if point.failed is None:
                self._try(point, partial(step, point))
        self.bench.note(None)

    def _leave(self, first: int) -> None:
        """The points from this one on are left for another chunk."""
        self.rest = [p.chosen for p in self.points[first:] if p.failed is None] + self.rest
        self.points[first:] = [p for p in self.points[first:] if p.failed is not None]

    def _try(self, point: Measured, action: Callable[[], None]) -> None:
        """Do it and wait; a point that fails is set aside with its reason."""
        begin = time.monotonic()
        self.bench.note(point.number)
        try:
            self.device.settings(_dtype(point))
            action()
            self.device.wait()
        except Exception as exc:  # whatever it is becomes a row
            if self.device.broken():
                raise Broken(_text(exc), point.chosen) from exc
            point.failed = (failure_status(exc), _text(exc))
        if point.failed is not None:
            point.workload = None
        if point.failed is not None and point.failed[0] == "oom":
            self.device.reset()  # only here: the traceback held on to what was allocated
            if len(self.points) > 1:
                self.later.append(point.chosen)
        point.busy_s += time.monotonic() - begin

    def _build(self) -> None:
        """Half of the time is for building; points beyond that, or beyond the arena, are left."""
        until_s = (self.begin_s + self.until_s) / 2
        for at, point in enumerate(self.points):
            full = self.device.held_bytes() > CHUNK_ARENA_FRAC * self.device.arena_bytes
            if at and (full or time.monotonic() > until_s):
                self._leave(at)
                break
            self._try(point, partial(self._build_one, point))

    def _build_one(self, point: Measured) -> None:
        family, params, _ = point.chosen
        point.workload = family.build(params, self.device.name)

    def _first_run(self, point: Measured) -> None:
        """Loads kernels and takes memory; not timed."""
        _workload(point).run()

    def _launch(self, point: Measured) -> None:
        """The host's time to launch, the device idle; ``torch.ops.aten``'s wrapper is warm."""
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
        """Find out whether the host waits for the device inside a run.

        It may where launching takes about as long as the device does. It does where launching takes
        longer behind a sleep of the device, twice in a row.
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
        """Samples cold and warm; of a host's event its time."""
        if _is_host(point):
            point.facts = host_timing(_workload(point), self.device.wait)
            return
        low, high = SAMPLES
        repetitions = max(low, min(high, int(SAMPLING_US / max(point.device_us, 1.0))))
        if point.device_us > LONG_RUN_US:
            repetitions = LONG_SAMPLES
        for cache in ("cold", "warm"):
            queued = self._queue(point, cache == "cold", repetitions)
            if not point.number % GLANCE_EVERY:
                self.readings.append(self.device.conditions())
            self.device.wait()
            kept = unstarved(queued)
            point.times_us[cache] = [self.device.elapsed_us(sample) for sample in kept]
            point.starved[cache] = kept[0].starved and not point.synchronises

    def _queue(self, point: Measured, cold: bool, repetitions: int) -> list[Launched]:
        """Queue that many samples, and up to as many again for those that starved.

        After each of these the device sleeps twice as long. It need not where the host waits for it
        anyway.
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
        try:
            self.device.settings("fp32")
            return reference_times(self.device, self.bench.anchor)
        except Exception as exc:
            if self.device.broken():
                raise Broken(_text(exc)) from exc
            raise

    def _profile(self) -> None:
        """Kernels of all points that were sampled, each under the settings of its dtype."""
        sampled = [p for p in self.points if p.times_us and p.failed is None]

        def run(point: Measured) -> None:
            self.device.settings(_dtype(point))
            _workload(point).run()

        self.bench.note(PROFILING)
        found = self.device.kernels([partial(run, p) for p in sampled])
        self.lost = self.device.broken()
        if not self.lost:
            self.bench.note(None)
        for point, kernels in zip(sampled, found, strict=True):
            point.facts = kernel_facts(kernels)

    def _rows(self, sweep: Sweep, shared: dict[str, Any], wall_s: float) -> list[dict[str, Any]]:
        """The chunk's time is shared out as its steps kept the host busy with each point."""
        status = "throttled" if is_throttled(shared) else "ok"
        waiting = {id(chosen) for chosen in self.later}
        points = [p for p in self.points if id(p.chosen) not in waiting]
        busy_s = sum(p.busy_s + 1e-4 for p in self.points)
        rows: list[dict[str, Any]] = []
        for point in points:
            found = self._of_point(sweep, point, {**shared, "status": status})
            cost_s = wall_s * (point.busy_s + 1e-4) / busy_s
            rows += [{**row, "cost_s": cost_s / len(found)} for row in found]
        return rows

    def _of_point(
        self, sweep: Sweep, point: Measured, common: dict[str, Any]
    ) -> list[dict[str, Any]]:
        facts = sweep.row_facts(*point.chosen)
        keys = sweep.row_keys(*point.chosen)
        if point.failed is not None:
            failed = dict(zip(("status", "reason"), point.failed, strict=True))
            return [{**facts, "cache": "warm", "key": keys["warm"], **failed}]
        if _is_host(point):
            timed = {"timer": "with_launch", "cache": "warm", "key": keys["warm"]}
            return [{**facts, **common, **timed, **point.facts}]
        workload, cost = _workload(point), self.bench.call_cost
        facts |= {**common, **point.facts, "synchronises": point.synchronises}
        facts["launch_us"] = launch_us(workload, point.launches_us, point.baselines_us, cost)
        rows = []
        for cache, times_us in point.times_us.items():
            runs_us = [max(us - common["empty_us"], MIN_DEVICE_US) for us in times_us]
            timing = asdict(summarise([us / workload.calls for us in runs_us]))
            timing["starved"] = point.starved[cache]
            rows.append({**facts, "cache": cache, "key": keys[cache], **timing})
        return rows


def failure_status(exc: Exception) -> str:
    """oom, unsupported or error."""
    text = str(exc).lower()
    if isinstance(exc, MemoryError) or any(said in text for said in OOM):
        return "oom"
    if isinstance(exc, NotImplementedError) or any(said in text for said in UNSUPPORTED):
        return "unsupported"
    return "error"


def _text(exc: Exception) -> str:
    return " ".join(str(exc).split())[:200]


def _dtype(point: Measured) -> str:
    return getattr(point.chosen[1], "dtype", "fp32")


def _is_host(point: Measured) -> bool:
    return point.chosen[0].name == "host"


def _workload(point: Measured) -> Workload:
    if point.workload is None:
        raise ValueError("the point was not built")
    return point.workload
