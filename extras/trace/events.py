"""Chrome traces of simulated iterations, for Perfetto: a process per rank, threads, flows, memory.

Times are in us from the iteration's start. Threads: the schedule of a pipeline, host, compute,
messages (those between stages on threads of their own), copies. Flows go
from a launch to its kernel, from compute to the messages that wait for it, and between ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from itercast.compose.simulate.rank import AMONG_GROUPS, MESSAGES, Run
from itercast.compose.simulate.timeline import Span, Task

THREADS = {  # lanes, in the order in which a process shows them
    "schedule": "schedule",
    "host": "host",
    "compute": "compute",
    "comm": "messages",
    AMONG_GROUPS: "messages among groups that shard",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
}
NUMBERS = {lane: number for number, lane in enumerate(THREADS)}
MOST_EVENTS = 200_000  # of all ranks; with more, of ranks that do the same one is shown
CHUNK = "chunk"  # lanes of messages between stages begin with it: chunk 0 to 1
LAUNCH = "launch "  # how names of tasks that launch another begin
Event = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A simulated run of one rank from ``start_us`` on.

    ``micro``: its micro-batch, if it has one. Work that ends before ``since_us`` is left out,
    except messages where ``messages`` is set.
    """

    tasks: Sequence[Task]
    spans: Sequence[Span]
    start_us: float = 0.0
    micro: int | None = None
    since_us: float = 0.0
    messages: bool = False

    def placed(self, i: int) -> Span | None:
        """When task ``i`` runs; None where it is left out."""
        span = self.spans[i]
        start, end = (self.start_us + us for us in (span.start_us, span.end_us))
        free = self.messages and self.tasks[i].lanes[0] in MESSAGES
        if self.tasks[i].lanes[0] == "compute" and not span.duration_us:
            return None  # Python alone, which launches nothing
        if not free and start < self.since_us:
            if end <= self.since_us:
                return None
            start = self.since_us
        return Span(start, end)


@dataclass
class Trace:
    """Events of all ranks, as they are added."""

    events: list[Event] = field(default_factory=list)
    flows: int = 0
    counted: list[tuple[int, float, float]] = field(default_factory=list)  # rank, us, bytes held

    def process(self, rank: int, name: str, lanes: Sequence[str]) -> None:
        """Name a rank and its threads."""
        self.events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]
        for lane in lanes:
            about = {"ph": "M", "pid": rank, "tid": thread_number(lane)}
            name, order = THREADS.get(lane, lane), {"sort_index": thread_number(lane)}
            self.events.append({**about, "name": "thread_name", "args": {"name": name}})
            self.events.append({**about, "name": "thread_sort_index", "args": order})

    def slice(
        self, rank: int, lane: str, name: str, span: Span, phase: str = "", **args: object
    ) -> None:
        """Add work on a thread; ``phase`` is its category."""
        shown = {k: v for k, v in args.items() if v is not None}
        at = {"pid": rank, "tid": thread_number(lane), "ts": round(span.start_us, 3)}
        how = {"ph": "X", "cat": phase or lane, "dur": round(span.duration_us, 3)}
        self.events.append({"name": name, **how, **at, "args": shown})

    def flow(self, name: str, *ends: tuple[int, str, float]) -> None:
        """Add an arrow from rank, lane and time to another one."""
        self.flows += 1
        for kind, (rank, lane, us) in zip(({"ph": "s"}, {"ph": "f", "bp": "e"}), ends, strict=True):
            at = {"pid": rank, "tid": thread_number(lane), "ts": round(us, 3)}
            self.events.append({"name": name, "cat": "flow", "id": self.flows, **kind, **at})

    def count(self, rank: int, us: float, held: Mapping[str, float]) -> None:
        """Add a point of the memory's counter, in bytes by purpose."""
        self.counted.append((rank, us, sum(held.values())))
        at = {"ph": "C", "name": "memory, bytes", "pid": rank, "ts": round(us, 3)}
        self.events.append({**at, "args": {name: round(n) for name, n in held.items()}})

    def part(self, rank: int, part: Part) -> None:
        """Add a run's tasks and their flows."""
        for i, task in enumerate(part.tasks):
            span, lane = part.placed(i), task.lanes[0]
            if span is None or lane not in THREADS:
                continue
            size = {"bytes": task.nbytes or None, "micro_batch": part.micro}
            self.slice(rank, lane, task.name, span, task.phase, **size)
            if lane == "host":
                self.launches(rank, part, i, span)
            elif lane in MESSAGES:
                self._message(rank, part, i, span)

    def launches(self, rank: int, part: Part, i: int, span: Span) -> None:
        """The arrow from a launch to the kernel that follows it in the list of tasks."""
        if i + 1 < len(part.tasks) and part.tasks[i].name == LAUNCH + part.tasks[i + 1].name:
            kernel, (lane,) = part.placed(i + 1), part.tasks[i + 1].lanes
            if kernel is not None:
                self.flow("launch", (rank, "host", span.start_us), (rank, lane, kernel.start_us))

    def _message(self, rank: int, part: Part, i: int, span: Span) -> None:
        """The arrows from the compute that a message waits for."""
        for j in part.tasks[i].after:
            before, lane = part.placed(j), part.tasks[j].lanes[0]
            if before is not None and lane == "compute":
                to = (rank, part.tasks[i].lanes[0], span.start_us)
                self.flow("message", (rank, lane, before.start_us), to)

    def memory(self, rank: int, parts: Sequence[Part], held: Mapping[str, float]) -> None:
        """Add the memory's counter: activations grow with forward's time and go with backward's.

        Their peak is that of the forecast; all else is held throughout.
        """
        steps, level, curve = _computed(parts), 0.0, list[tuple[float, float]]()
        for us, part in steps:
            level = max(0.0, level + part)
            curve.append((us, level))
        peak, rest = max((x for _, x in curve), default=0.0) or 1.0, dict(held)
        saved = rest.pop("activations", 0.0)
        self.count(rank, 0.0, {**rest, "activations": 0.0})
        for us, x in curve:
            self.count(rank, us, {**rest, "activations": saved * x / peak})

    def held(self) -> dict[str, list[tuple[float, float]]]:
        """By rank's name the memory's counter: times in us and bytes."""
        names = {e["pid"]: f"rank {e['pid']}" for e in self.events if e["name"] == "process_name"}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
        for one in self.counted:
            found[f"rank {one[0]}"].append(one[1:])
        return found

    def to_json(self) -> dict[str, object]:
        """The file's content."""
        return {"traceEvents": self.events, "displayTimeUnit": "ms"}


def _computed(parts: Sequence[Part]) -> list[tuple[float, float]]:
    """Memory changes of a micro-batch: (end of a compute task in us, share added or freed).

    Each share is that of the task in the time of its pass; forward adds 1 in all, backward frees
    it.
    """
    found: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for part in parts:
        for i, task in enumerate(part.tasks):
            span = part.placed(i)
            if span is not None and task.lanes[0] == "compute" and task.phase in found:
                found[task.phase].append((span.end_us, span.duration_us))
    steps = []
    for phase, sign in (("forward", 1.0), ("backward", -1.0)):
        total = sum(us for _, us in found[phase]) or 1.0
        steps += [(end_us, sign * us / total) for end_us, us in found[phase]]
    return sorted(steps)


def thread_number(lane: str) -> int:
    """The number of the thread that shows a lane, by which a process orders its threads.

    After the fixed lanes come pairs: "chunk A to B" (messages of a pipeline from chunk A, those to
    later chunks first), or "stream N" of a captured script.
    """
    if lane in NUMBERS:
        return NUMBERS[lane]
    words = lane.split()
    if words[0] == CHUNK:
        return len(NUMBERS) + 2 * int(words[1]) + (int(words[-1]) < int(words[1]))
    return len(NUMBERS) + int(words[-1])


def program_trace(runs: Mapping[int, Run], peak_bytes: Mapping[int, int]) -> Trace:
    """The trace of captured ranks; arrows join the ranks of a message."""
    trace, first = Trace(), dict[Hashable, tuple[int, str, float]]()
    for rank, run in runs.items():
        part, lanes = Part(tasks=run.tasks, spans=run.spans), dict[str, None]()
        for i, task in enumerate(run.tasks):
            lane, span = task.lanes[0], run.spans[i]
            if lane.startswith("path"):
                continue
            lanes[lane] = None
            trace.slice(rank, lane, task.name, span, task.phase, bytes=task.nbytes or None)
            at = (rank, lane, span.start_us)
            if first.setdefault(task.once, at) != at and task.once is not None:
                trace.flow(task.name, first[task.once], at)
            trace.launches(rank, part, i, span)
        trace.process(rank, f"rank {rank}", list(lanes))
        if rank in peak_bytes:
            trace.count(rank, 0.0, {"peak": peak_bytes[rank]})
    return trace
