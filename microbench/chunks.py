"""Points measured in chunks on a device that runs behind the host.

A chunk is built, run once, run again for estimates, sampled, and profiled; the host waits for the
device once after each of these and never for one point.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from microbench.kernels import kernel_facts
from microbench.nvml import is_throttled
from microbench.ops.family import Workload
from microbench.sweep import Chosen, Sweep
from microbench.timing import summarise

CHUNK_POINTS = 96
CHUNK_ARENA_FRAC = 0.4  # what a chunk's operands take at most; results need room, too
SAMPLING_US = 6000.0  # of a point and cache: what repetitions add up to at most
SAMPLES = (3, 10)
ESTIMATES = 3
ANCHOR_SAMPLES = 5
HOST_SAMPLES = 10
MIN_HOST_US = 0.5
OOM = ("out of memory", "can't allocate", "alloc_failed")
UNSUPPORTED = ("not implemented", "not supported", "only supported", "unable to find an engine")
Run = Callable[[], object]


class Broken(Exception):
    """The device answers no more (a sticky error): this process must end."""


class Device(Protocol):
    """A device that queues work. ``CudaDevice`` is one; tests have a clockwork one."""

    name: str
    arena_bytes: int

    def settings(self, dtype: str) -> None:
        """What products of this dtype need: TF32 on or off."""

    def held_bytes(self) -> int:
        """Bytes of everything that is allocated."""

    def launch(self, run: Run) -> tuple[float, Any]:
        """Queue a run between two events: the host's time in us, and what ``elapsed`` takes."""

    def sample(self, run: Run, cold: bool, launch_us: float) -> Any:
        """Queue a run, cold after a flush or warm after another run, the host well ahead."""

    def elapsed_us(self, launched: Any) -> float:
        """Device time of a queued run, once the device has caught up."""

    def wait(self) -> None:
        """Until the device has caught up."""

    def broken(self) -> bool:
        """Whether the device answers no more."""

    def kernels(self, runs: Sequence[Run]) -> list[list[tuple[str, float]]]:
        """Kernels and their durations, by run."""

    def conditions(self) -> dict[str, Any]:
        """Clocks, power and temperature as they are now."""

    def reset(self) -> None:
        """After an allocation failed: give back what is free and take the arena anew."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """A point of a chunk on its way to rows; ``failed`` is a reason, by status."""

    chosen: Chosen
    workload: Workload | None = None
    failed: tuple[str, str] | None = None
    launched: list[tuple[float, Any]] = field(default_factory=list)
    launch_us: float = 0.0
    device_us: float = 0.0
    busy_s: float = 0.0  # of the host and the device together
    samples: dict[str, list[Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Chunk:
    """The points of one chunk; ``later`` are those that did not fit beside others.

    ``anchor`` is a fixed run, timed in every chunk to show drift.
    """

    def __init__(self, device: Device, chosen: Sequence[Chosen], anchor: Run) -> None:
        self.device, self.anchor = device, anchor
        self.points = [Measured(chosen=c) for c in chosen]
        self.later: list[Chosen] = []

    def measure(self, sweep: Sweep) -> list[dict[str, Any]]:
        """Rows of all points but ``later``; Broken where the device gave up."""
        begin = time.monotonic()
        before = self.device.conditions()
        for step in (self._build, self._first_run, self._launch, self._estimate):
            self._guard(step)
        fixed: dict[str, list[Any]] = {"drift_us": [], "empty_us": []}
        conditions = self._guard(lambda: self._sample(fixed))
        if len(self.points) > 1:  # a session costs more than all the rest of a point alone
            self._guard(self._profile)
        conditions |= {name: self._median_us(marks) for name, marks in fixed.items()}
        if "energy_j" in conditions:
            conditions["energy_j"] -= before["energy_j"]
        return self._rows(sweep, conditions, time.monotonic() - begin)

    def _alive(self) -> list[Measured]:
        return [p for p in self.points if p.failed is None]

    def _median_us(self, marks: Sequence[Any]) -> float:
        return summarise([self.device.elapsed_us(mark) for mark in marks]).time_us

    def _guard(self, step: Callable[[], Any]) -> Any:
        """A step, and the wait after it; what goes wrong only then is nobody's in particular."""
        try:
            found = step()
            self.device.wait()
        except Exception as exc:
            if isinstance(exc, Broken) or not self.device.broken():
                raise
            raise Broken(_text(exc)) from exc
        return found

    def _try(self, point: Measured, action: Callable[[], Any]) -> None:
        """Do it; a point that fails is set aside with its reason."""
        begin = time.monotonic()
        try:
            self.device.settings(getattr(point.chosen[1], "dtype", "fp32"))
            action()
        except Exception as exc:  # whatever it is becomes a row
            if self.device.broken():
                raise Broken(_text(exc)) from exc
            point.failed = (failure_status(exc), _text(exc))
        if point.failed is not None:
            point.workload = None
        if point.failed is not None and point.failed[0] == "oom":
            self.device.reset()  # only now: the traceback held on to what was allocated
            if len(self.points) > 1:
                self.later.append(point.chosen)
        point.busy_s += time.monotonic() - begin

    def _build(self) -> None:
        """Points that would fill the arena are left for later."""
        for at, point in enumerate(self.points):
            if at and self.device.held_bytes() > CHUNK_ARENA_FRAC * self.device.arena_bytes:
                self.later += [p.chosen for p in self.points[at:]]
                del self.points[at:]
                return
            self._try(point, partial(self._build_one, point))

    def _build_one(self, point: Measured) -> None:
        family, params, _ = point.chosen
        point.workload = family.build(params, self.device.name)

    def _first_run(self) -> None:
        for point in self._alive():
            self._try(point, _workload(point).run)

    def _launch(self) -> None:
        """The points in turn, as ops of a step are, for what a launch costs."""
        for _ in range(ESTIMATES):
            for point in self._alive():
                self._try(point, partial(self._launch_one, point))

    def _launch_one(self, point: Measured) -> None:
        point.launched.append(self.device.launch(_workload(point).run))

    def _estimate(self) -> None:
        for point in self._alive():
            point.launch_us = statistics.median(us for us, _ in point.launched)
            point.device_us = min(self.device.elapsed_us(mark) for _, mark in point.launched)

    def _sample(self, fixed: dict[str, list[Any]]) -> dict[str, Any]:
        """Queue all samples; what the driver says of the device while it is at work."""
        for point in self._alive():
            host = point.chosen[0].name == "host"
            self._try(point, partial(self._time_host if host else self._sample_one, point))
        for name, run in (("drift_us", self.anchor), ("empty_us", _nothing)):
            fixed[name] += [self.device.sample(run, False, 0.0) for _ in range(ANCHOR_SAMPLES)]
        return self.device.conditions()

    def _time_host(self, point: Measured) -> None:
        point.facts = host_timing(_workload(point), self.device.wait)

    def _sample_one(self, point: Measured) -> None:
        run, (low, high) = _workload(point).run, SAMPLES
        repetitions = max(low, min(high, int(SAMPLING_US / max(point.device_us, 1.0))))
        for cache in ("cold", "warm"):
            queued = [
                self.device.sample(run, cache == "cold", point.launch_us)
                for _ in range(repetitions)
            ]
            point.samples[cache] = queued

    def _profile(self) -> None:
        alive = [p for p in self._alive() if p.samples]
        launched = self.device.kernels([_workload(p).run for p in alive])
        for point, kernels in zip(alive, launched, strict=True):
            point.facts = kernel_facts(kernels)

    def _rows(
        self, sweep: Sweep, conditions: dict[str, Any], wall_s: float
    ) -> list[dict[str, Any]]:
        """The chunk's time is shared out as host and device were busy with each point."""
        status = "throttled" if is_throttled(conditions) else "ok"
        rows: list[dict[str, Any]] = []
        for point in self.points:
            runs = sum(len(s) for s in point.samples.values())
            point.busy_s += 1e-6 * point.device_us * runs + 1e-4
        busy_s = sum(p.busy_s for p in self.points)
        waiting = {id(c) for c in self.later}
        for point in (p for p in self.points if id(p.chosen) not in waiting):
            found = self._of_point(sweep, point, {**conditions, "status": status})
            cost_s = wall_s * point.busy_s / busy_s
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
        if not point.samples:
            timed = {"timer": "with_launch", "cache": "warm", "key": keys["warm"]}
            return [{**facts, **common, **timed, **point.facts}]
        calls = _workload(point).calls
        facts |= {**common, **point.facts, "launch_us": point.launch_us}
        rows = []
        for cache, marks in point.samples.items():
            times = [self.device.elapsed_us(mark) / calls for mark in marks]
            rows.append({**facts, "cache": cache, "key": keys[cache], **asdict(summarise(times))})
        return rows


def host_timing(workload: Workload, wait: Callable[[], None]) -> dict[str, Any]:
    """Host time of a call less the baseline's, nobody waiting for the device in between."""

    def once(run: Run) -> float:
        wait()
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1e3

    less_us = 0.0
    if workload.baseline is not None:
        less_us = statistics.median(once(workload.baseline) for _ in range(HOST_SAMPLES))
    times = [max(once(workload.run) - less_us, MIN_HOST_US) for _ in range(HOST_SAMPLES)]
    return asdict(summarise([us / workload.calls for us in times]))


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


def _workload(point: Measured) -> Workload:
    if point.workload is None:
        raise ValueError("the point was not built")
    return point.workload


def _nothing() -> None:
    """What is timed to know what events cost."""
