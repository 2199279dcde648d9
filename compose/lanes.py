"""Tasks of one rank under construction: what is on which lane, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from compose.priced import PricedOp
from compose.timeline import Task
from compose.work import Work

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
