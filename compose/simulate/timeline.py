"""Simulates tasks on lanes, of one rank or of several, which may slow each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from itercast.compose.machines.contention import Slowdowns, mixed

SHARED = ("compute", "comm", "stream")  # lanes of a rank that slow each other, by their first word
CORES = "cores"  # the device of all ranks on a CPU


@dataclass(frozen=True, slots=True)
class Task:
    """Work that occupies all its lanes at once, after the tasks whose numbers ``after`` lists.

    ``phase`` of the step and ``nbytes`` of a message or copy are for traces. A task with the same
    ``once`` on several ranks is one that they run together. ``products_frac``: the share of
    compute's time in products; ``beside``: how a message slows compute
    (``itercast.compose.machines.contention``); ``nodes``: among how many nodes a message is sent, 0
    of all else.
    """

    lanes: tuple[str, ...]
    duration_us: float
    after: tuple[int, ...] = ()
    name: str = ""
    phase: str = ""
    nbytes: float = 0.0
    once: Hashable = None
    products_frac: float = 0.0
    beside: Slowdowns | None = None
    nodes: int = 0

    def joined(self, lanes: tuple[str, ...], us: float, after: tuple[int, ...]) -> Task:
        """The task with another rank's part in it; it takes as long as on the slowest."""
        return replace(
            self,
            lanes=(*self.lanes, *lanes),
            duration_us=max(self.duration_us, us),
            after=(*self.after, *after),
        )

    def check(self, number: int) -> None:
        """Raise ValueError where the task cannot run."""
        if not self.duration_us >= 0 or not self.lanes:  # NaN is no duration either
            raise ValueError(f"task {number} needs lanes and a duration >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Time from start to end."""
        return self.end_us - self.start_us


class DeadlockError(RuntimeError):
    """Raised when lanes wait for each other; the message names the next task of each lane."""


class _Progress:
    """Tracks which tasks may start: those next on all their lanes whose inputs are done."""

    def __init__(self, tasks: Sequence[Task], programs: Mapping[str, Sequence[int]] | None) -> None:
        self.tasks = tasks
        self.lanes: dict[str, list[int]] = {}
        for i, task in enumerate(tasks):
            task.check(i)
            for lane in task.lanes:
                self.lanes.setdefault(lane, []).append(i)
        for lane, order in (programs or {}).items():
            if sorted(order) != sorted(self.lanes.get(lane, [])):
                raise ValueError(f"program of lane {lane!r} lists {order}, not its tasks")
            self.lanes[lane] = list(order)
        self.position = dict.fromkeys(self.lanes, 0)
        # By task what it still waits for: other tasks, and to be the next one of its lanes.
        self.missing = [len(set(t.after)) + len(set(t.lanes)) for t in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for j in set(task.after):
                if not 0 <= j < len(tasks):
                    raise ValueError(f"task {i} waits for unknown task {j}")
                self.followers[j].append(i)
        self.done = 0
        self.ready: list[int] = []
        for order in self.lanes.values():
            self._input_done(order[0])

    def _input_done(self, i: int) -> None:
        """Note that an input or a lane that task i waits for is ready."""
        self.missing[i] -= 1
        if self.missing[i] == 0:
            self.ready.append(i)

    def finish(self, i: int) -> None:
        """Free the task's lanes; tasks whose last input it was become ready."""
        self.done += 1
        for lane in set(self.tasks[i].lanes):
            self.position[lane] += 1
            if self.position[lane] < len(self.lanes[lane]):
                self._input_done(self.lanes[lane][self.position[lane]])
        for j in self.followers[i]:
            self._input_done(j)

    def check(self) -> None:
        """Raise DeadlockError unless every task is done."""
        if self.done == len(self.tasks):
            return
        heads = [
            f"{lane}: {self.tasks[order[at]].name or f'task {order[at]}'}"
            for lane, order in self.lanes.items()
            if (at := self.position[lane]) < len(order)
        ]
        raise DeadlockError(f"lanes wait for each other; next tasks: {', '.join(heads)}")


def simulate(
    tasks: Sequence[Task], programs: Mapping[str, Sequence[int]] | None = None
) -> list[Span]:
    """When each task runs: as soon as its lanes are free and its inputs are done.

    A lane runs its tasks in the order of the list, or of its entry in ``programs``.
    """
    if programs is None and all(0 <= j < i for i, task in enumerate(tasks) for j in task.after):
        return _in_order(tasks)
    return _at_shared_speed(_Progress(tasks, programs), {}, {})


def _in_order(tasks: Sequence[Task]) -> list[Span]:
    """``simulate`` for tasks that wait only for earlier ones: one pass in order."""
    free: dict[str, float] = {}
    spans: list[Span] = []
    for i, task in enumerate(tasks):
        task.check(i)
        start = 0.0
        for lane in task.lanes:
            start = max(start, free.get(lane, 0.0))
        for j in task.after:
            start = max(start, spans[j].end_us)
        end = start + task.duration_us
        for lane in task.lanes:
            free[lane] = end
        spans.append(Span(start, end))
    return spans


def simulate_shared(
    tasks: Sequence[Task],
    shared: Mapping[str, str],
    contention: float | Mapping[str, float],
    programs: Mapping[str, Sequence[int]] | None = None,
) -> list[Span]:
    """``simulate`` where tasks on lanes of one device slow each other while they overlap.

    ``shared`` names the device of lanes that slow each other. While two tasks on lanes of a device
    run, each of them proceeds at 1/contention of its speed; durations are those of a task alone.
    ``contention``, one number or by device, is 1 if tasks do not slow each other, 2 if they share
    one core. For compute and a message that states its own, the message's counts (``beside``). A
    task on several devices, or beside several tasks, is slowed by the worst of them.
    """
    if isinstance(contention, float | int):
        contention = dict.fromkeys(shared.values(), contention)
    if min(contention.values(), default=1) < 1:
        raise ValueError(f"contention must be at least 1, got {min(contention.values())}")
    stated = any(task.beside is not None for task in tasks)
    if max(contention.values(), default=1) == 1 and not stated:
        return simulate(tasks, programs)
    return _at_shared_speed(_Progress(tasks, programs), shared, contention)


def _at_shared_speed(
    progress: _Progress, shared: Mapping[str, str], contention: Mapping[str, float]
) -> list[Span]:
    """Runs tasks from one end of a task to the next, at the speed that contention leaves them."""
    tasks = progress.tasks
    devices = [{shared[lane] for lane in task.lanes if lane in shared} for task in tasks]
    now = 0.0
    left: dict[int, float] = {}  # work of the running tasks
    start: dict[int, float] = {}
    spans: dict[int, Span] = {}
    while progress.ready or left:
        for i in progress.ready:
            left[i], start[i] = tasks[i].duration_us, now
        progress.ready.clear()
        busy = [i for i in left if left[i] > 0 and devices[i]]
        slow = {i: 1.0 for i in left}
        for i, j in combinations(busy, 2):
            for device in devices[i] & devices[j]:
                factor = _contention(tasks[i], tasks[j], contention[device])
                slow[i], slow[j] = max(slow[i], factor), max(slow[j], factor)
        needed = {i: work * slow[i] for i, work in left.items()}
        step = min(needed.values())
        now += step
        for i in list(left):
            if needed[i] <= step:
                del left[i]
                spans[i] = Span(start[i], now)
                progress.finish(i)
            else:
                left[i] -= step / slow[i]
    progress.check()
    return [spans[i] for i in range(len(tasks))]


def _contention(a: Task, b: Task, alike: float) -> float:
    """Slowdown of two tasks at once: what a message states ``beside`` compute, else ``alike``.

    A message within a node does not slow a message between nodes: they use different links.
    """
    if a.nodes and b.nodes and (a.nodes > 1) != (b.nodes > 1):
        return 1.0
    if a.beside is not None and b.beside is None:
        return mixed(a.beside, b.products_frac)
    if b.beside is not None and a.beside is None:
        return mixed(b.beside, a.products_frac)
    return alike


def side_by_side(
    ranks: Sequence[Sequence[Task]], contention: Sequence[float], crowding: float = 1.0
) -> list[tuple[Span, ...]]:
    """When each rank's tasks run; tasks with equal ``once`` (a message) are one on all its ranks.

    It starts with the last rank and takes as long as on the slowest. ``contention`` by rank: of
    lanes that are ``SHARED``; ``crowding``: slowdown while several ranks compute on shared cores.
    """
    joint, number = list[Task](), [list[int]() for _ in ranks]  # by rank, of its tasks among all
    programs: dict[str, list[int]] = defaultdict(list)
    number_of: dict[Hashable, int] = {}
    for r, tasks in enumerate(ranks):
        for task in tasks:
            lanes = tuple(f"{r} {lane}" for lane in task.lanes)
            lanes += (f"{r} {CORES}",) * (crowding > 1 and "compute" in task.lanes)
            after = tuple(number[r][j] for j in task.after)
            new = len(joint)
            n = new if task.once is None else number_of.setdefault(task.once, new)
            if n < new:
                joint[n] = joint[n].joined(lanes, task.duration_us, after)
            else:
                joint.append(replace(task, lanes=lanes, after=after))
            number[r].append(n)
            for lane in lanes:
                programs[lane].append(n)
    shared = {f"{r} {CORES}": CORES for r in range(len(ranks))} if crowding > 1 else {}
    for lane in programs:
        rank, name = lane.split()[:2]
        if name in SHARED:
            shared[lane] = rank
    factors = {str(r): factor for r, factor in enumerate(contention)} | {CORES: crowding}
    spans = simulate_shared(joint, shared, factors, programs)
    return [tuple(spans[n] for n in own) for own in number]
