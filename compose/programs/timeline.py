"""Simulates the ranks of a captured program together: hosts, streams, and messages between ranks.

A collective among captured ranks is one task for all of them: it starts when the last one arrives.
A rank that was not captured does what a captured one does, at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall
from itercast.capture.programs.program import (
    BATCH,
    COLLECTIVE,
    FIRST_GROUP_STREAM,
    HOST_COPY,
    HOST_WAIT,
    ON_CPU,
    RECORD,
    WAIT,
)
from itercast.compose.pricing.priced_op import PricedOp
from itercast.compose.pricing.work import Step, fold
from itercast.compose.programs.price import PricedRank
from itercast.compose.simulate.breakdown import lane_spans
from itercast.compose.simulate.rank import Lanes, Run
from itercast.compose.simulate.timeline import Span, side_by_side

COMM = "comm"  # phase of collectives
Tasks = tuple[int, ...]  # by their numbers


class RankLanes(Lanes):
    """Turns the launches of one rank into tasks: one between marks, or one per op (``each_op``).

    ``open``: ops launched since the last mark. ``lane``, ``done`` and ``waits`` belong to the
    current ``stream``. ``batches``: where the host takes each batch of the last step from the
    DataLoader.
    """

    def __init__(self, rank: int, priced: PricedRank, slowdown: float, each_op: bool) -> None:
        super().__init__(priced.on_cpu, slowdown)
        self.rank, self.priced, self.each_op = rank, priced, each_op
        self.stream = 0
        self.others: dict[int, tuple[Tasks, Tasks]] = {}  # by stream: ``done``, ``waits``
        self.points: dict[Hashable, Tasks] = {}  # by step and CUDA event: what it waits for
        self.batches: list[tuple[Tasks, Tasks]] = []  # the host's last tasks, and the stream's
        self.open: list[Step] = []  # ops since the last mark
        self.launched: dict[tuple[int, bool], Step] = {}  # by id of the op: it may be repeated
        self.counts: dict[Hashable, int] = defaultdict(int)

    def step(self, number: int) -> None:
        """Add all launches of one step."""
        self.batches = []
        for call, op in zip(self.priced.calls, self.priced.ops, strict=True):
            stream = self._stream(call)
            if op is not None and stream == ON_CPU:
                self._close()
                self.on_host(op, ())
                continue
            if op is None or call.op == HOST_COPY or call.op == COLLECTIVE or stream != self.stream:
                self._close()
                self._turn_to(stream)
            if call.op == RECORD:
                self.points[number, call.args[0]] = self.done + self.waits
            elif call.op == WAIT:
                self.waits += self.points.get((number, call.args[0]), ())
            elif call.op == BATCH:
                self.batches.append((self.host, self.done))
            elif call.op == HOST_WAIT:
                self.host += self.points.get((number, call.args[0]), ())
            elif op is not None and call.op == HOST_COPY:
                after, self.waits = self.done + self.waits + self.host, ()
                self.done = (self._add(op.op, op.duration_us, after, op.op, COMM, op.nbytes),)
            elif op is not None and call.op == COLLECTIVE:
                self._collective(call, op)
            elif op is not None:
                self._launch(op, bool(call.graphed))
        self._close()

    def _stream(self, call: OpCall) -> int:
        """The stream of a launch; a CPU has one beside those of groups."""
        return 0 if self.on_cpu and call.stream < FIRST_GROUP_STREAM else call.stream

    def _turn_to(self, stream: int) -> None:
        """Make a stream the current one."""
        self.others[self.stream] = (self.done, self.waits)
        self.done, self.waits = self.others.get(stream, ((), ()))
        self.stream, self.lane = stream, f"stream {stream}" if stream else "compute"

    def _launch(self, op: PricedOp, graphed: bool) -> None:
        """Queue an op on the current stream; the host waits for one that needs its result."""
        if (step := self.launched.get((id(op), graphed))) is None:
            step = replace(self.priced.launches.step(op), waits=False)
            step = replace(step, launch_us=0.0) if graphed else step
            self.launched[id(op), graphed] = step
        self.open.append(step)
        if op.waits:
            self._close()
            self.host += self.done

    def _close(self) -> None:
        """Make the ops in ``open`` tasks: one of their sum, or one for each op."""
        steps, self.open = self.open, []
        if self.each_op:
            for step in steps:
                self._op(step)
        else:
            self.work(fold(steps, self.on_cpu), "compute")

    def _collective(self, call: OpCall, op: PricedOp) -> None:
        """Add a message; the n-th one of a key is one task for all ranks that take part."""
        after, self.waits = self.done + self.waits + self.host, ()
        key = self._key(call)
        self.counts[key] += 1
        named = replace(op, op=call.kwargs["kind"], phase=COMM, nbytes=call.kwargs["bytes"])
        self.done = (self._message(named, self.lane, after, (key, self.counts[key])),)

    def _key(self, call: OpCall) -> Hashable:
        """A key that is equal on all ranks that take part in this collective or message."""
        facts = call.kwargs
        if facts["peer"] < 0:
            return (facts["kind"], facts["ranks"])
        pair = (self.rank, facts["peer"])
        return ("message", *(pair if facts["kind"] == "send" else reversed(pair)))


def simulate_program(
    ranks: Mapping[int, PricedRank],
    contention: float,
    cores_frac: float = 0.0,
    each_op: bool = False,
) -> tuple[dict[int, Run], float]:
    """Simulates two steps in a row; returns runs by rank, and the second step's time in us.

    ``cores_frac``: the share of a CPU's cores that a captured rank takes while it computes,
    together with the ranks it stands for. If ranks take more than there are, compute is slower, by
    the mean while any of them computes. ``each_op``: each op is a task with the op's name, as a
    timeline shows it; else the ops between two marks are one.
    """
    runs, iteration_us = _simulated(ranks, contention, 1.0)
    slowdown = 1.0
    if cores_frac * len(ranks) > 1:
        slowdown = _shared_cores(runs.values(), cores_frac)
    if slowdown == 1 and not each_op:
        return runs, iteration_us
    return _simulated(ranks, contention, slowdown, each_op)


def _shared_cores(runs: Iterable[Run], cores_frac: float) -> float:
    """Slowdown of ranks that share cores: the mean while any of them computes.

    While n compute it is max(1, n * cores_frac).
    """
    computing = [span for run in runs for span in lane_spans(run)["compute"]]
    changes = [(s.start_us, 1) for s in computing] + [(s.end_us, -1) for s in computing]
    total_us = slowed_us = before_us = 0.0
    ranks = 0
    for at_us, change in sorted(changes):
        if ranks:
            total_us += at_us - before_us
            slowed_us += (at_us - before_us) * max(1.0, ranks * cores_frac)
        ranks, before_us = ranks + change, at_us
    return slowed_us / total_us if total_us else 1.0


def _simulated(
    ranks: Mapping[int, PricedRank], contention: float, slowdown: float, each_op: bool = False
) -> tuple[dict[int, Run], float]:
    """As ``simulate_program``, with compute slowed down by a factor."""
    lanes = [RankLanes(rank, priced, slowdown, each_op) for rank, priced in ranks.items()]
    for of_rank in lanes:
        of_rank.step(0)
    tasks_of_first = [len(of_rank.tasks) for of_rank in lanes]
    for of_rank in lanes:
        of_rank.step(1)
    spans = side_by_side([of_rank.tasks for of_rank in lanes], [contention] * len(lanes))
    ends = [s.end_us for own, n in zip(spans, tasks_of_first, strict=True) for s in own[:n]]
    runs = {
        of_rank.rank: Run(tasks=tuple(of_rank.tasks), spans=own, queued_us=_queued_us(of_rank, own))
        for of_rank, own in zip(lanes, spans, strict=True)
    }
    return runs, max(run.end_us for run in runs.values()) - max(ends, default=0.0)


def _queued_us(lanes: RankLanes, spans: Sequence[Span]) -> float:
    """How far the GPU is behind when the host takes a batch, in us; summed over a step."""

    def end_us(tasks: Iterable[int]) -> float:
        return max((spans[i].end_us for i in tasks), default=0.0)

    return sum(max(0.0, end_us(done) - end_us(host)) for host, done in lanes.batches)
