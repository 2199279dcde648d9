"""One rank: what it holds, and its tasks on lanes as its program is built.

Lanes: host, compute, comm, and h2d and d2h for what is offloaded. Ops between two points where
lanes meet are one task (``compose.pricing.work``), so a step has as many tasks as it has messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from compose.parallel.plan import ParallelPlan
from compose.pricing.collectives import Cluster, Message, price_messages
from compose.pricing.layer_prices import PricedLayer, PricedModel
from compose.pricing.price_book import PriceBook, PricedOp
from compose.pricing.work import Work
from compose.simulate.data_parallel import Filled, Strategy, strategy
from compose.simulate.timeline import Span, Task, simulate_shared

SHARED = frozenset({"compute", "comm"})
LATENCY = "latency"  # of messages: nothing is slowed by it


@dataclass
class Lanes:
    """Tasks under construction; ``done`` is what compute has done so far.

    ``crowd`` ranks share each core of a CPU: compute takes that much longer.
    """

    on_cpu: bool
    crowd: float = 1.0
    tasks: list[Task] = field(default_factory=list)
    done: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    comm_us: float = 0.0  # collectives within the compute lane

    def _add(self, lane: str, us: float, after: tuple[int, ...], name: str) -> int:
        self.tasks.append(Task((lane,), us, after, name))
        return len(self.tasks) - 1

    def work(self, work: Work, name: str) -> None:
        """A run of ops; it starts when compute is free and what is awaited is there."""
        if work == Work():
            return
        after, self.waits = self.done + self.waits, ()
        self.comm_us += work.comm_us
        own_us = self.crowd * (work.lane_us - work.comm_us)
        compute = self._add("compute", work.comm_us + own_us, after, name)
        self.done = (compute,)
        if not self.on_cpu:
            path = self._add(f"path {len(self.tasks)}", work.path_us, self.host, f"launch {name}")
            self.host = (self._add("host", work.host_us, self.host, f"launch {name}"),)
            self.done = (compute, path)

    def send(self, op: PricedOp, lane: str = "comm", after: tuple[int, ...] | None = None) -> int:
        """A message beside compute, once what compute has done so far (or ``after``) is done."""
        after = self.done if after is None else after
        if op.latency_us:
            after = (self._add(LATENCY, op.latency_us, after, op.op),)
        return self._add(lane, op.duration_us - op.latency_us, after, op.op)

    def wait(self, tasks: Iterable[int]) -> None:
        """What compute does next waits for these."""
        self.waits += tuple(tasks)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a stage: its layers in forward order, each instance, and what it needs."""

    plan: ParallelPlan
    layers: tuple[PricedLayer, ...]
    model: PricedModel
    book: PriceBook
    where: Cluster
    contention: float

    @cached_property
    def crowd(self) -> float:
        """How many ranks compute on each core of a CPU, on average; 1 on GPUs.

        In a pipeline 1, 2, ... stages are busy while it fills, and fewer again while it drains.
        """
        if self.book.gpu.kind != "cpu":
            return 1.0
        plan, cores = self.plan, self.book.gpu.sm_count
        micro, each = plan.microbatches, plan.world_size // plan.pp * self.book.threads
        slots = micro + plan.pp - 1
        busy = (min(s + 1, plan.pp, micro, slots - s) for s in range(slots))
        return sum(max(1.0, each * n / cores) for n in busy) / slots

    @cached_property
    def strategy(self) -> Strategy:
        """How its replicas stay equal."""
        return strategy(self.plan)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulated rank program: tasks, spans, and what ran in it besides compute."""

    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]
    blocking_us: float
    sent: tuple[PricedOp, ...] = ()
    updates: tuple[PricedOp, ...] = ()
    copies: tuple[PricedOp, ...] = ()

    @property
    def end_us(self) -> float:
        """When all is done."""
        return max((s.end_us for s in self.spans), default=0.0)


class RankTasks:
    """The tasks of a rank's program under construction, and what was priced on the way."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.how = rank, rank.strategy
        self.lanes = Lanes(rank.book.gpu.kind == "cpu", rank.crowd)
        self.sent: list[PricedOp] = []
        self.copies: list[PricedOp] = []
        self.updates: list[PricedOp] = []
        self.filled: list[Filled] = []

    def run(self) -> Run:
        """All of it simulated."""
        found = simulate_shared(self.lanes.tasks, SHARED, self.rank.contention)
        return Run(
            tasks=tuple(self.lanes.tasks),
            spans=tuple(found),
            blocking_us=self.lanes.comm_us,
            sent=tuple(self.sent),
            updates=tuple(self.updates),
            copies=tuple(self.copies),
        )

    def price(self, messages: Sequence[Message]) -> list[PricedOp]:
        """Messages with durations, noted as sent."""
        rank = self.rank
        found = price_messages(messages, rank.book, rank.where)
        self.sent += found
        return found
