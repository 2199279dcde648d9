"""Replays a trace of jobs on GPUs of several kinds, with and without a table of throughputs.

Trace and table are in Gavel's layout (``itercast.compose.throughput``). A line of a
trace has nine fields, separated by tabs: job type, command, argument of the number of steps,
whether it needs a data folder, steps, GPUs, priority, deadline, arrival in s. Jobs run to their end
on GPUs of one kind.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

FIELDS = 9
JOB = re.compile(r"\('(.*)', (\d+)\)")
Rates = Mapping[tuple[str, int], Mapping[str, float]]  # steps/s by (job type, GPUs), by GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of a trace; it takes ``steps / rate`` seconds on each GPU that it fits on."""

    arrival_s: float
    gpus: int
    seconds_on: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How waiting jobs are chosen: ``knows`` what the table says of the time on each kind of GPU.

    Jobs are placed in the order of arrival, or the shortest first. One that knows places a job
    where it ends first, another where it starts first.
    """

    knows: bool
    shortest_first: bool


POLICIES = {
    "fifo": Policy(knows=False, shortest_first=False),
    "fifo, best GPU": Policy(knows=True, shortest_first=False),
    "shortest first, best GPU": Policy(knows=True, shortest_first=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a policy makes of a trace; completion is from arrival to end."""

    policy: str
    mean_completion_s: float
    max_completion_s: float
    makespan_s: float
    gpu_hours: float


def read_rates(paths: Sequence[Path]) -> Rates:
    """Tables in Gavel's layout, joined; jobs that share GPUs are left out."""
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for path in paths:
        try:
            table = json.loads(path.read_text())
            if not isinstance(table, dict):
                raise ValueError("expected an object: steps/s by GPU and by job")
            for gpu, jobs in table.items():
                if not isinstance(jobs, dict):
                    raise ValueError(f"{gpu}: expected an object: steps/s by job")
                for key, alone in jobs.items():
                    job = JOB.fullmatch(key)
                    if job is None:
                        raise ValueError(f"a job is ('TYPE', GPUS), got {key!r}")
                    rate = float(alone["null"])
                    if not (math.isfinite(rate) and rate >= 0):
                        raise ValueError(f"{key}: steps/s are 0 or more, got {rate}")
                    rates.setdefault((job[1], int(job[2])), {})[gpu] = rate
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise ValueError(f"throughputs {str(path)!r}: {exc}") from None
    return rates


def read_cluster(text: str) -> dict[str, int]:
    """GPUs of each kind, from text such as ``v100-sxm-16gb=4,a100-sxm-80gb=4``."""
    found = dict[str, int]()
    for part in text.split(","):
        gpu, _, count = part.strip().partition("=")
        number = int(count) if count.isascii() and count.isdecimal() and len(count) < 7 else 0
        if number < 1 or not gpu or gpu in found:
            raise ValueError(f"gpus {text!r}: each kind once as NAME=COUNT, got {part.strip()!r}")
        found[gpu] = number
    return found


def read_trace(path: Path, rates: Rates, cluster: Mapping[str, int]) -> list[Job]:
    """The jobs of a trace by arrival; ValueError where one runs on no GPU of the cluster."""
    jobs = list[Job]()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"trace {str(path)!r}: {exc}") from None
    for number, line in enumerate(lines, 1):
        try:
            jobs.append(_job(line, rates, cluster))
        except ValueError as exc:
            raise ValueError(f"trace {str(path)!r}, line {number}: {exc}") from None
    if not jobs:
        raise ValueError(f"trace {str(path)!r}: no jobs")
    return sorted(jobs, key=lambda job: job.arrival_s)


def _job(line: str, rates: Rates, cluster: Mapping[str, int]) -> Job:
    fields = line.split("\t")
    if len(fields) != FIELDS:
        raise ValueError(f"{FIELDS} fields separated by tabs, got {len(fields)}")
    kind, steps, gpus, arrival_s = fields[0], int(fields[4]), int(fields[5]), float(fields[8])
    if steps < 1 or gpus < 1 or not (math.isfinite(arrival_s) and arrival_s >= 0):
        got = f"got {steps}, {gpus} and {arrival_s:g} s"
        raise ValueError(f"steps and GPUs are 1 or more, the arrival is 0 or later; {got}")
    known = rates.get((kind, gpus))
    if known is None:
        numbers = sorted(number for name, number in rates if name == kind)
        names = sorted({name for name, _ in rates})
        has = f"on {numbers}" if numbers else f"of {names}"
        raise ValueError(f"no throughput of {kind!r} on {gpus} GPUs; the tables have those {has}")
    seconds = {
        gpu: steps / known[gpu] for gpu, n in cluster.items() if known.get(gpu) and n >= gpus
    }
    if not seconds:
        raise ValueError(f"{kind!r} on {gpus} GPUs fits none of {', '.join(cluster)}")
    return Job(arrival_s=arrival_s, gpus=gpus, seconds_on=seconds)


def replay(jobs: Sequence[Job], cluster: Mapping[str, int], name: str) -> Replay:
    """Run all jobs under a policy.

    Whenever a job arrives or ends, all waiting jobs are placed anew, each on the GPUs that are free
    first; those whose turn is now start.
    """
    policy, waiting = POLICIES[name], list(jobs)
    free_s = {gpu: [0.0] * count for gpu, count in cluster.items()}
    completion_s, ends_s, gpu_s, now_s = list[float](), list[float](), 0.0, 0.0
    while waiting:
        planned = {gpu: list(times) for gpu, times in free_s.items()}
        arrived = [job for job in waiting if job.arrival_s <= now_s]
        if policy.shortest_first:
            arrived.sort(key=lambda job: min(job.seconds_on.values()))
        for job in arrived:
            gpu, start_s = _place(job, planned, now_s, policy)
            _occupy(planned[gpu], job, start_s + job.seconds_on[gpu])
            if start_s <= now_s:
                _occupy(free_s[gpu], job, end_s := now_s + job.seconds_on[gpu])
                waiting.remove(job)
                ends_s.append(end_s)
                completion_s.append(end_s - job.arrival_s)
                gpu_s += job.gpus * job.seconds_on[gpu]
        later = [t for times in free_s.values() for t in times if t > now_s]
        later += [job.arrival_s for job in waiting if job.arrival_s > now_s]
        now_s = min(later, default=now_s)
    return Replay(
        policy=name,
        mean_completion_s=mean(completion_s),
        max_completion_s=max(completion_s),
        makespan_s=max(ends_s),
        gpu_hours=gpu_s / 3600,
    )


def _place(
    job: Job, free_s: Mapping[str, list[float]], now_s: float, policy: Policy
) -> tuple[str, float]:
    """The kind of GPU for a job, and when so many of it are free."""
    starts_s = {gpu: max(now_s, sorted(free_s[gpu])[job.gpus - 1]) for gpu in job.seconds_on}
    known = {gpu: job.seconds_on[gpu] if policy.knows else 0.0 for gpu in starts_s}
    return min(starts_s.items(), key=lambda item: item[1] + known[item[0]])


def _occupy(free_s: list[float], job: Job, until_s: float) -> None:
    """Give a job the GPUs that are free first."""
    free_s.sort()
    free_s[: job.gpus] = [until_s] * job.gpus
