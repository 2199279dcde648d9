"""Breaks an iteration down by family, lane and assumption, for plans and programs alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from itercast.compose.pricing.host import PYTHON
from itercast.compose.pricing.priced_op import UNMODELLED, AssumedTime, PricedOp
from itercast.compose.simulate.rank import Run
from itercast.compose.simulate.timeline import Span, Task


@dataclass
class Tally:
    """Sums the times of a rank's ops by family, and the assumptions they rest on.

    ``us``: time by family; host work is part of it only on a CPU, where it is on the compute lane.
    ``compute``, ``comm`` and ``host`` are sums by lane. ``far_us``: messages between nodes;
    ``hidden_us``: the hidden part of messages whose duration is only what compute does not hide.
    """

    on_cpu: bool
    us: dict[str, float] = field(default_factory=dict)
    compute: AssumedTime = field(default_factory=AssumedTime)
    comm: AssumedTime = field(default_factory=AssumedTime)
    host: AssumedTime = field(default_factory=AssumedTime)
    far_us: float = 0.0
    hidden_us: float = 0.0

    def count(self, ops: Iterable[PricedOp], times: float = 1.0) -> None:
        """Count ops, messages and host work that run ``times`` times."""
        for op in ops:
            if self.on_cpu or op.phase != PYTHON:
                self.us[op.family] = self.us.get(op.family, 0.0) + times * op.duration_us
            lane = {"comm": self.comm, PYTHON: self.host}.get(op.phase, self.compute)
            lane.add_us(times * op.duration_us, op.assumed)
            self.hidden_us += times * op.hidden_us
            if op.nodes > 1:
                self.far_us += times * op.duration_us

    def add_all(self, other: Tally, times: float) -> None:
        """Add all that another one counted, ``times`` times."""
        for name, us in other.us.items():
            self.us[name] = self.us.get(name, 0.0) + times * us
        for lane in ("compute", "comm", "host"):
            getattr(self, lane).add_all(getattr(other, lane), times)
        self.far_us += times * other.far_us
        self.hidden_us += times * other.hidden_us

    @property
    def unmodelled_frac(self) -> float:
        """Share of the time of all ops that no learned model priced."""
        total = sum(self.us.values())
        return self.us.get(UNMODELLED, 0.0) / total if total else 0.0


def assumed_us(
    tally: Tally, compute_us: float, exposed_comm_us: float, host_gap_us: float
) -> dict[str, float]:
    """The part of an iteration that rests on each assumption, largest first.

    Compute, exposed communication and host gaps each count by the share of assumed times in all
    that runs on their lane, hidden or not; on a CPU the host's time is part of compute.
    """
    compute = AssumedTime()
    compute.add_all(tally.compute)
    if tally.on_cpu:
        compute.add_all(tally.host)
    by_name_us: dict[str, float] = {}
    lanes = ((compute, compute_us), (tally.comm, exposed_comm_us), (tally.host, host_gap_us))
    for lane, time_us in lanes:
        for name, share in lane.shares:
            by_name_us[name] = by_name_us.get(name, 0.0) + share * time_us
    return {name: us for name, us in sorted(by_name_us.items(), key=lambda kv: -kv[1]) if us > 0}


def lane_spans(run: Run) -> Mapping[str, list[Span]]:
    """When a run computes, on whichever stream, and when it sends messages or copies ("comm")."""
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for task, span in zip(run.tasks, run.spans, strict=True):
        lane = task.lanes[0].partition(" ")[0]
        if lane in ("comm", "h2d", "d2h") or task.once is not None:
            by_lane["comm"].append(span)
        else:
            by_lane["compute" if lane == "stream" else lane].append(span)
    return by_lane


def covered_us(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans runs."""
    total = end = 0.0
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        total += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return total


@dataclass(frozen=True, slots=True)
class Shares:
    """How a run's time is spent, in us.

    ``end_us``: the whole run; ``compute_us``: computing; ``exposed_us``: waiting for messages;
    ``comm_us``: sending messages, hidden behind compute or not.
    """

    end_us: float = 0.0
    compute_us: float = 0.0
    exposed_us: float = 0.0
    comm_us: float = 0.0

    def plus(self, other: Shares, times: float) -> Shares:
        """This run followed by another one ``times`` times."""
        return Shares(
            self.end_us + times * other.end_us,
            self.compute_us + times * other.compute_us,
            self.exposed_us + times * other.exposed_us,
            self.comm_us + times * other.comm_us,
        )

    @property
    def idle_us(self) -> float:
        """Neither computing nor waiting for messages."""
        return max(0.0, self.end_us - self.compute_us - self.exposed_us)


def shares(run: Run) -> Shares:
    """Split a run's time; collectives that block compute count as exposed."""
    spans, late_us = lane_spans(run), run.blocking_us
    computing, sending = spans["compute"], spans["comm"]
    compute_us = covered_us(computing)
    exposed_us = covered_us([*computing, *sending]) - compute_us
    comm_us = covered_us(sending) + late_us
    return Shares(run.end_us, compute_us - late_us, exposed_us + late_us, comm_us)


def added_up(runs: Sequence[tuple[Run, float]]) -> Shares:
    """Split the time of runs, each with how often it is repeated."""
    total = Shares()
    for run, times in runs:
        total = total.plus(shares(run), times)
    return total


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An iteration on the slowest rank; iteration = compute + exposed_comm + idle.

    idle = host gaps + pipeline bubble + waiting for slower stages. ``matmul_s``: matrix products at
    peak, the mean over ranks. ``assumed_by_us``: what of the iteration rests on each assumption
    (see ``Forecast``). ``tasks`` show the last micro-batch and the optimizer. Where ranks are
    unlike, ``slowest`` and ``fullest`` are the numbers of the stage or kind that times and memory
    are of. ``host_memory_bytes``: what a rank offloads, of the one that offloads most.
    """

    iteration_us: float
    compute_us: float
    exposed_comm_us: float
    comm_us: float
    host_gap_us: float
    bubble_us: float
    waiting_us: float
    memory: dict[str, int]
    tally: Tally
    assumed_by_us: dict[str, float]
    matmul_s: float
    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]
    slowest: int = 0
    fullest: int = 0
    host_memory_bytes: int = 0

    @property
    def idle_us(self) -> float:
        """Time in which the compute lane neither computes nor waits for a message."""
        return max(0.0, self.iteration_us - self.compute_us - self.exposed_comm_us)

    @property
    def memory_bytes(self) -> int:
        """Peak of the fullest rank."""
        return sum(self.memory.values())


def broken_down(
    lanes: Shares,
    tally: Tally,
    shown: Run,
    *,
    memory: dict[str, int],
    matmul_s: float,
    host_gap_us: float,
    bubble_us: float = 0.0,
    slowest: int = 0,
    fullest: int = 0,
) -> Outcome:
    """The outcome of a rank whose iteration takes ``lanes.end_us``, with idle time by its cause.

    Idle time is first gaps in which the host launches (``host_gap_us`` at most), then a pipeline's
    bubble (``bubble_us`` at most), then waiting for other ranks. Bubble and waiting rest on
    assumptions to the same share as all other time. ``shown``: see ``Outcome.tasks``.
    """
    end_us = lanes.end_us
    compute_us = min(lanes.compute_us, end_us)
    exposed_us = min(lanes.exposed_us, end_us - compute_us)
    idle_us = max(0.0, end_us - compute_us - exposed_us)
    gaps_us = min(idle_us, host_gap_us)
    bubble_us = min(bubble_us, idle_us - gaps_us)
    by_name_us = assumed_us(tally, compute_us, exposed_us, gaps_us)
    scale = end_us / max(1e-9, compute_us + exposed_us + gaps_us)
    return Outcome(
        iteration_us=end_us,
        compute_us=compute_us,
        exposed_comm_us=exposed_us,
        comm_us=lanes.comm_us,
        host_gap_us=gaps_us,
        bubble_us=bubble_us,
        waiting_us=max(0.0, idle_us - bubble_us - gaps_us),
        memory=memory,
        tally=tally,
        assumed_by_us={name: scale * us for name, us in by_name_us.items()},
        matmul_s=matmul_s,
        tasks=shown.tasks,
        spans=shown.spans,
        slowest=slowest,
        fullest=fullest,
    )
