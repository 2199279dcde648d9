"""Splits a simulated rank program's time: by family with bounds, by lane, by assumption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from compose.pricing.assumed_time import AssumedShares, AssumedTime
from compose.pricing.host import PYTHON
from compose.pricing.price_book import UNCERTAINTY_FACTOR, UNMODELLED, PricedOp
from compose.simulate.rank import LATENCY, Run
from compose.simulate.timeline import Span


@dataclass
class Tally:
    """Time by family with its bounds, and what of it rests on assumptions, by lane.

    Errors within a family add up, those of families are independent.
    """

    us: dict[str, float] = field(default_factory=dict)
    below: dict[str, float] = field(default_factory=dict)
    above: dict[str, float] = field(default_factory=dict)
    compute: AssumedTime = field(default_factory=AssumedTime)
    comm: AssumedTime = field(default_factory=AssumedTime)
    host: AssumedTime = field(default_factory=AssumedTime)

    def add(self, ops: Iterable[PricedOp], times: float = 1.0) -> None:
        """Add ops of the compute lane that run ``times`` times; collectives among them block it."""
        for op in ops:
            self._add_family(op, times)
            lane = {"comm": self.comm, PYTHON: self.host}.get(op.phase, self.compute)
            lane.add(times * op.duration_us, op.assumed)

    def add_sent(self, messages: Iterable[PricedOp], times: float = 1.0) -> None:
        """Add messages beside compute that are sent ``times`` times."""
        for op in messages:
            self._add_family(op, times)
            self.comm.add(times * op.duration_us, op.assumed)

    def add_host(self, time_us: float, shares: AssumedShares, *, in_compute: bool) -> None:
        """Add host time; ``in_compute``: of a CPU, where it lengthens ops, with wide bounds."""
        self.host.add(time_us, shares)
        if in_compute and time_us:
            low_us, high_us = time_us / UNCERTAINTY_FACTOR, time_us * UNCERTAINTY_FACTOR
            self._add_bounds("host", time_us, low_us, high_us, 1.0)

    def widen_by_host(self, host_us: float, busy_us: float, spread: float) -> None:
        """Bounds of an iteration whose host takes ``host_us`` times or over ``spread``.

        A GPU that works or waits for messages for ``busy_us`` hides as much of the host's time:
        the iteration changes as max(host, busy) does.
        """
        now_us = max(host_us, busy_us)
        self.below["host"] = now_us - max(host_us / spread, busy_us)
        self.above["host"] = max(host_us * spread, busy_us) - now_us

    def _add_family(self, op: PricedOp, times: float) -> None:
        self._add_bounds(op.family, op.duration_us, op.low_us, op.high_us, times)

    def _add_bounds(self, family: str, us: float, low: float, high: float, times: float) -> None:
        self.us[family] = self.us.get(family, 0.0) + times * us
        self.below[family] = self.below.get(family, 0.0) + times * (us - low)
        self.above[family] = self.above.get(family, 0.0) + times * (high - us)

    def bounds(self, iteration_us: float) -> tuple[float, float]:
        """Lower and upper bound of the iteration's 80 % interval."""
        below, above = (sqrt(sum(v * v for v in d.values())) for d in (self.below, self.above))
        return max(0.0, iteration_us - below), iteration_us + above

    @property
    def unmodelled_frac(self) -> float:
        """Share of the time of all ops that no learned model priced."""
        total = sum(self.us.values())
        return self.us.get(UNMODELLED, 0.0) / total if total else 0.0


def assumed_us(
    tally: Tally, compute_us: float, exposed_comm_us: float, host_gap_us: float, *, on_cpu: bool
) -> dict[str, float]:
    """What of an iteration rests on each assumption, largest first.

    Compute, exposed communication and host gaps each count by the share of assumed numbers in all
    that runs on their lane, hidden or not; on a CPU the host's time is part of compute.
    """
    compute = AssumedTime()
    compute.add_all(tally.compute)
    if on_cpu:
        compute.add_all(tally.host)
    found: dict[str, float] = {}
    lanes = ((compute, compute_us), (tally.comm, exposed_comm_us), (tally.host, host_gap_us))
    for lane, time_us in lanes:
        for name, share in lane.shares:
            found[name] = found.get(name, 0.0) + share * time_us
    return {name: us for name, us in sorted(found.items(), key=lambda kv: -kv[1]) if us > 0}


def lane_spans(run: Run, *lanes: str) -> list[Span]:
    """Spans of the tasks on some lanes."""
    return [s for t, s in zip(run.tasks, run.spans, strict=True) if t.lanes[0] in lanes]


def covered_us(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans runs."""
    total = end = 0.0
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        total += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return total


@dataclass(frozen=True, slots=True)
class Shares:
    """A run's time: all, computing, exposed messages, and messages whether hidden or not."""

    end_us: float
    compute_us: float
    exposed_us: float
    comm_us: float

    def plus(self, other: Shares, times: int) -> Shares:
        """This run followed by another one ``times`` times."""
        return Shares(
            self.end_us + times * other.end_us,
            self.compute_us + times * other.compute_us,
            self.exposed_us + times * other.exposed_us,
            self.comm_us + times * other.comm_us,
        )


def shares(run: Run) -> Shares:
    """Split a run's time; collectives that block compute count as exposed."""
    lane_us = covered_us(lane_spans(run, "compute"))
    sent = lane_spans(run, LATENCY, "comm", "h2d", "d2h")
    exposed_us = covered_us([*lane_spans(run, "compute"), *sent]) - lane_us + run.blocking_us
    comm_us = covered_us(sent) + run.blocking_us
    return Shares(run.end_us, lane_us - run.blocking_us, exposed_us, comm_us)
