"""Simulates ranks of several kinds side by side: their messages wait for the last of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from itercast.compose.simulate.iteration import Outcome, fullest, micro_batches, outcome
from itercast.compose.simulate.rank import LATENCY, SHARED, Rank, Run
from itercast.compose.simulate.timeline import Task, simulate_shared

CORES = "cores"  # the device of all ranks on a CPU


def evaluate_replicas(ranks: Sequence[Rank], optimizer: str, crowding: float = 1.0) -> Outcome:
    """The iteration of replicas of unlike work or devices, broken down on the one that waits least.

    One rank of each kind, with its own micro-batch: they are simulated side by side, and a message
    waits for all of them. ``crowding``: slowdown of ranks of a CPU whose computing overlaps.
    """
    laid = [micro_batches(rank, optimizer) for rank in ranks]
    alone = [outcome(x, *runs, optimizer) for x, runs in zip(ranks, laid, strict=True)]
    factors = [rank.contention for rank in ranks]
    finals = together([run for _, run in laid], factors, crowding)
    before = [
        together([run for run, _ in turn], factors, crowding)
        for turn in zip(*(one for one, _ in laid), strict=True)
    ]
    times = [n for _, n in laid[0][0]]
    found = [
        outcome(x, [(turn[i], n) for turn, n in zip(before, times, strict=True)], run, optimizer)
        for i, (x, run) in enumerate(zip(ranks, finals, strict=True))
    ]
    end_us = max(one.iteration_us for one in found)
    slowest = max(range(len(ranks)), key=lambda i: found[i].compute_us)
    least_left = fullest(ranks, [one.memory for one in found])
    mine, gaps_us = found[slowest], min(found[slowest].host_gap_us, alone[slowest].host_gap_us)
    return replace(
        mine,
        iteration_us=end_us,
        host_gap_us=gaps_us,
        waiting_us=max(0.0, end_us - mine.compute_us - mine.exposed_comm_us - gaps_us),
        memory=found[least_left].memory,
        slowest=slowest,
        fullest=least_left,
    )


def together(runs: Sequence[Run], contention: Sequence[float], crowding: float) -> list[Run]:
    """The runs of ranks, one of each kind, with the spans of a simulation of all of them.

    Message k of one rank is message k of all: it starts when the last rank has come to it, and
    takes as long as on the slowest. ``contention`` of messages and compute by rank; ``crowding``:
    slowdown of ranks that share a CPU's cores while two or more of them compute.
    """
    parts = [list(_parts(run.tasks)) for run in runs]
    if len({len(part) for part in parts}) > 1:
        counts = ", ".join(str(len(part) - 1) for part in parts)
        raise ValueError(f"ranks of one job send equally many messages, these {counts}")
    tasks = list[Task]()
    number: list[dict[int, int]] = [{} for _ in runs]  # by rank, of its tasks among all
    for turn in zip(*parts, strict=True):
        for r, (own, _) in enumerate(turn):
            for i in own:
                number[r][i] = len(tasks)
                tasks.append(_renamed(runs[r].tasks[i], r, number[r]))
        messages = [(r, i) for r, (_, i) in enumerate(turn) if i is not None]
        for r, i in messages:
            number[r][i] = len(tasks)
        if messages:
            mine = [_renamed(runs[r].tasks[i], r, number[r]) for r, i in messages]
            tasks.append(
                Task(
                    tuple(lane for task in mine for lane in task.lanes),
                    max(task.duration_us for task in mine),
                    tuple({j for task in mine for j in task.after}),
                    mine[0].name,
                )
            )
    shared = {f"{r} {lane}": str(r) for r in range(len(runs)) for lane in SHARED}
    factors = {str(r): factor for r, factor in enumerate(contention)}
    shared |= {f"{r} {CORES}": CORES for r in range(len(runs))}
    spans = simulate_shared(tasks, shared, factors | {CORES: crowding})
    return [
        replace(run, spans=tuple(spans[number[r][i]] for i in range(len(run.tasks))))
        for r, run in enumerate(runs)
    ]


def _parts(tasks: Sequence[Task]) -> Iterator[tuple[list[int], int | None]]:
    """Numbers of the tasks up to each message, and of the message; None after the last."""
    own = list[int]()
    for i, task in enumerate(tasks):
        if task.lanes[0] in (LATENCY, "comm"):
            yield own, i
            own = []
        else:
            own.append(i)
    yield own, None


def _renamed(task: Task, rank: int, number: dict[int, int]) -> Task:
    lanes = [f"{rank} {lane}" for lane in task.lanes]
    lanes += [f"{rank} {CORES}"] * ("compute" in task.lanes)
    return replace(task, lanes=tuple(lanes), after=tuple(number[i] for i in task.after))
