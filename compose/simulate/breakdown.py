"""Where a simulated rank program's time went: by family with bounds, and by lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from compose.pricing.price_book import UNMODELLED, PricedOp
from compose.simulate.rank import LATENCY, Run
from compose.simulate.timeline import Span


@dataclass
class Tally:
    """Time by family with its bounds; errors within a family add, between families squared."""

    us: dict[str, float] = field(default_factory=dict)
    below: dict[str, float] = field(default_factory=dict)
    above: dict[str, float] = field(default_factory=dict)

    def add(self, ops: Iterable[PricedOp], times: float = 1.0) -> None:
        """Ops that run ``times`` times."""
        for op in ops:
            self.us[op.family] = self.us.get(op.family, 0.0) + times * op.duration_us
            low, high = op.duration_us - op.low_us, op.high_us - op.duration_us
            self.below[op.family] = self.below.get(op.family, 0.0) + times * low
            self.above[op.family] = self.above.get(op.family, 0.0) + times * high

    def add_us(self, family: str, us: float) -> None:
        """Time whose bounds are a factor of two."""
        self.us[family] = self.us.get(family, 0.0) + us
        self.below[family] = self.below.get(family, 0.0) + us / 2
        self.above[family] = self.above.get(family, 0.0) + us

    def bounds(self, iteration_us: float) -> tuple[float, float]:
        """10 and 90 % bounds of the iteration."""
        below, above = (sqrt(sum(v * v for v in d.values())) for d in (self.below, self.above))
        return max(0.0, iteration_us - below), iteration_us + above

    @property
    def unmodelled_frac(self) -> float:
        """Share of the time that no learned model priced."""
        total = sum(self.us.values())
        return self.us.get(UNMODELLED, 0.0) / total if total else 0.0


def lane_spans(run: Run, *lanes: str) -> list[Span]:
    """When the lanes' tasks ran."""
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
    """Time of a run: computing, waiting for messages, and messages whether hidden or not."""

    end_us: float
    compute_us: float
    exposed_us: float
    comm_us: float

    def plus(self, other: Shares, times: int) -> Shares:
        """This, and another run that many times."""
        return Shares(
            self.end_us + times * other.end_us,
            self.compute_us + times * other.compute_us,
            self.exposed_us + times * other.exposed_us,
            self.comm_us + times * other.comm_us,
        )


def shares(run: Run) -> Shares:
    """What a run's time went to; collectives within compute count as exposed."""
    lane_us = covered_us(lane_spans(run, "compute"))
    sent = lane_spans(run, LATENCY, "comm", "h2d", "d2h")
    exposed_us = covered_us([*lane_spans(run, "compute"), *sent]) - lane_us + run.blocking_us
    comm_us = covered_us(sent) + run.blocking_us
    return Shares(run.end_us, lane_us - run.blocking_us, exposed_us, comm_us)
