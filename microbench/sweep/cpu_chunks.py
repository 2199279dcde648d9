"""Measures chunks of points by the host's clock: on a CPU, and collectives on all ranks together.

Cold times of a chunk's points come last, as they share the flushes of the caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from itercast.microbench.hardware.machine import scratch_bytes
from itercast.microbench.ops.family import Family, Point, Workload
from itercast.microbench.ops.step.alpha_beta import NOBODY_WAITS, is_among
from itercast.microbench.processes.ranks import max_over_ranks, time_collective
from itercast.microbench.processes.virtual_cores import VirtualCores
from itercast.microbench.store import Row
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.rows import failure
from itercast.microbench.sweep.scheduler import Chosen, Sweep
from itercast.microbench.sweep.under_way import UnderWay
from itercast.microbench.timing.clock import Anchor, Clock, Timing

TWIN_US = 2000.0  # no assumption: of longer ops cold code is a small part, and operands are large
CHUNK_S = 2.0  # no assumption: after it no further point of a chunk is begun,
CHUNK_FRAC = 0.05  # no assumption: nor after this share of the sweep's time
DISTURBED = 1.25  # no assumption: times the shortest anchor; a point is then timed again
OP_TIMES = ("time_us", "time_us_mean", "time_us_p20", "time_us_p80")
TIMES = (*OP_TIMES, "anchor_us", "serial_us", "cost_s")


@dataclass(slots=True, kw_only=True)
class Measured:
    """A point's rows so far.

    ``workload`` is None where no cold time is to be measured. ``twin``: the same op on operands of
    its own, which warms the op's code before a cold time, but none of its data; None for long ops.
    """

    chosen: Chosen
    rows: list[Row]
    cost_s: float
    workload: Workload | None = None
    twin: Workload | None = None


class CpuBench:
    """Measures points one by one with warm caches, then all with cold ones."""

    # no assumption: of a chunk; how many it measures the clock decides, as flushes cost the same
    points, seconds = 32, math.inf
    broken = False  # the process can go on whatever happens

    def __init__(self, sweep: Sweep, under_way: UnderWay) -> None:
        self.sweep, self.order, self.under_way = sweep, sweep.order, under_way
        self.clock = Clock(self.order.threads, self.order.hardware["cold_share"], self.order.ranks)
        on_cpu = self.order.device == "cpu"
        ranks, budget_s = self.order.ranks, self.order.budget_s
        self.cores = VirtualCores(ranks, budget_s) if on_cpu else None
        self.times_us = Anchor(self.order.threads).times_us if on_cpu else dict[str, float]
        self.speed_us, self.least_us = dict[str, float](), math.inf

    def measure(
        self, chosen: Sequence[Chosen], until_s: float
    ) -> tuple[list[Row], list[list[Chosen]]]:
        """Measures points; returns rows, and points that time or memory did not suffice for.

        A collective, or a point that failed, has one row, others a warm and a cold one.
        """
        measured, room_bytes = list[Measured](), scratch_bytes(self.order.ranks)
        chunk_s = min(CHUNK_S, CHUNK_FRAC * self.order.budget_s)
        until_s = min(until_s, time.monotonic() + chunk_s)
        if self.cores:
            self.cores.settle()
        self.speed_us = self.times_us()
        for point in chosen:
            late_s = agreed_s(self.order, time.monotonic() - until_s) if measured else 0.0
            if measured and (room_bytes <= 0 or late_s >= 0):
                break
            self.under_way.note(point)
            measured.append(self._warm(point))
            room_bytes -= 2.0 * float(point.family.bytes_moved(point.point))  # the twin has as many
        self.under_way.note(None)
        self._cold([p for p in measured if p.workload])
        rows = [[{**row, "cost_s": p.cost_s / len(p.rows)} for row in p.rows] for p in measured]
        if self.order.together:
            rows = [slowest_rows(of_point) for of_point in rows]
        return [row for of_point in rows for row in of_point], [list(chosen[len(measured) :])]

    def _warm(self, chosen: Chosen) -> Measured:
        """Build a point and time it with warm caches; a collective on all ranks together."""
        family, point, _ = chosen
        begin = time.monotonic()
        workload: Workload | None = None
        twin: Workload | None = None
        try:
            built = build_together(self.order, family, point)
            if family.ranks > 1:
                waits = not is_among(point.op, NOBODY_WAITS)
                timing = time_collective(built.run, self.order.device, waits)
                speed = self._speed()
            else:
                (timing, speed), workload = self._time_warm(built), built
            row = self.sweep.row(chosen, "warm", {**asdict(timing), "status": "ok", **speed})
            if workload and timing.time_us < TWIN_US:
                twin = family.build(point, self.order.device)
        except Exception as exc:  # any failure becomes a row
            workload, row = None, self.sweep.row(chosen, "warm", failure(exc))
        cost_s = time.monotonic() - begin
        return Measured(chosen=chosen, rows=[row], cost_s=cost_s, workload=workload, twin=twin)

    def _time_warm(self, workload: Workload) -> tuple[Timing, dict[str, float]]:
        """Time a point, and once more where other processes slowed this one down meanwhile."""
        timing, speed = self.clock.time_warm(workload), self._speed()
        if self.cores and not self.order.together:
            self.least_us = min(self.least_us, self.speed_us["anchor_us"])
            if speed["anchor_us"] > DISTURBED * self.least_us:
                self.cores.settle()
                self.speed_us = self.times_us()
                again = self.clock.time_warm(workload), self._speed()
                return min((timing, speed), again, key=lambda timed: timed[1]["anchor_us"])
        return timing, speed

    def _speed(self) -> dict[str, float]:
        """Times of the anchors since they were last timed: their geometric means then and now."""
        before, self.speed_us = self.speed_us, self.times_us()
        return {name: (before[name] * us) ** 0.5 for name, us in self.speed_us.items()}

    def _cold(self, points: Sequence[Measured]) -> None:
        """Time all points with cold caches and add their rows."""
        begin = time.monotonic()
        timings = self.clock.time_cold([(p.workload, p.twin) for p in points if p.workload])
        speed = self._speed()
        shared_s = (time.monotonic() - begin) / max(1, len(points))
        for point, timing in zip(points, timings, strict=True):
            measured = {**asdict(timing), "status": "ok", **speed}
            point.rows.append(self.sweep.row(point.chosen, "cold", measured))
            point.cost_s += shared_s


def build_together(order: WorkerOrder, family: Family, point: Point) -> Workload:
    """Build a point's workload; RuntimeError where another rank could not build it."""
    raised: Exception | None = None
    try:
        workload = family.build(point, order.device)
    except Exception as exc:  # any failure becomes a row
        raised = exc
    if order.together and max_over_ranks([float(raised is not None)])[0] and raised is None:
        raised = RuntimeError("another rank could not build it")
    if raised is not None:
        raise raised
    return workload


def agreed_s(order: WorkerOrder, now_s: float) -> float:
    """The latest time of all ranks, so that all ranks stop at the same point."""
    return max_over_ranks([now_s])[0] if order.together else now_s


def slowest_rows(rows: list[Row]) -> list[Row]:
    """Replace times by those of the slowest rank; a point that failed on one rank has failed."""
    # One message for both rows of a point, of the same length on all ranks; inf stands for none.
    times = [[float(row.get(name, math.inf)) for name in TIMES] for row in rows]
    times += [[math.inf] * len(TIMES)] * (2 - len(rows))  # a failure is one row, a success two
    slowest_times = max_over_ranks([t for row in times for t in row])
    slowest = []
    for number, row in enumerate(rows):
        values = slowest_times[number * len(TIMES) :][: len(TIMES)]
        measured = {n: t for n, t in zip(TIMES, values, strict=True) if n in row}
        if any(math.isinf(t) for t in measured.values()) and row["status"] == "ok":
            row = {**row, "status": "error", "reason": "another rank failed"}
            measured = {}
        slowest.append({**row, **measured})
    return slowest
