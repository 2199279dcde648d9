"""Simulates ranks of several kinds side by side: their messages wait for the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from itercast.compose.simulate.breakdown import Outcome, Shares, broken_down
from itercast.compose.simulate.iteration import fullest, micro_batches, outcome
from itercast.compose.simulate.rank import LATENCY, SHARED, Rank, Run
from itercast.compose.simulate.timeline import JointTasks, Task

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
    return broken_down(
        Shares(end_us, mine.compute_us, mine.exposed_comm_us, mine.comm_us),
        mine.tally,
        memory=found[least_left].memory,
        matmul_s=mine.matmul_s,
        tasks=mine.tasks,
        spans=mine.spans,
        host_gap_us=gaps_us,
        slowest=slowest,
        fullest=least_left,
    )


def together(runs: Sequence[Run], contention: Sequence[float], crowding: float) -> list[Run]:
    """The runs of ranks, one of each kind, with the spans of a simulation of all of them.

    Message k of one rank is message k of all: it starts when the last rank has come to it, and
    takes as long as on the slowest. ``contention`` of messages and compute by rank; ``crowding``:
    slowdown of ranks that share a CPU's cores while two or more of them compute.
    """
    counts = [sum(map(_is_message, run.tasks)) for run in runs]
    if len(set(counts)) > 1:
        told = ", ".join(map(str, counts))
        raise ValueError(f"ranks of one job send equally many messages, these {told}")
    joint, number = JointTasks(), [list[int]() for _ in runs]  # by rank, of its tasks among all
    for r, run in enumerate(runs):
        sent = count()
        for task in run.tasks:
            lanes = [f"{r} {lane}" for lane in task.lanes]
            lanes += [f"{r} {CORES}"] * ("compute" in task.lanes)
            once = next(sent) if _is_message(task) else None
            after = tuple(number[r][j] for j in task.after)
            number[r].append(joint.add(tuple(lanes), task.duration_us, after, task.name, once))
    shared = {f"{r} {lane}": str(r) for r in range(len(runs)) for lane in SHARED}
    factors = {str(r): factor for r, factor in enumerate(contention)}
    shared |= {f"{r} {CORES}": CORES for r in range(len(runs))}
    spans = joint.simulate(shared, factors | {CORES: crowding})
    return [
        replace(run, spans=tuple(spans[i] for i in own))
        for run, own in zip(runs, number, strict=True)
    ]


def _is_message(task: Task) -> bool:
    return task.lanes[0] in (LATENCY, "comm")
