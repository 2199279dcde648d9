"""Jobs of a trace, tables of throughputs, and what a replay of them comes to.

Trace and table are in Gavel's layout (``itercast.extras.schedulers.table``). A line of a
trace has nine fields, separated by tabs: job type, command, argument of the number of steps,
whether it needs a data folder, steps, GPUs, priority, deadline, arrival in s.
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
BATCH = re.compile(r"(.*) \(batch size (\d+)\)")
Rates = Mapping[tuple[str, int], Mapping[str, float]]  # steps/s by (job type, GPUs), by GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of a trace; it takes ``steps / rate`` seconds on each GPU that it fits on.

    ``speeds``: share of it per second on so many GPUs of a kind, with the batch that is fastest
    there; ``asked``: the same on the GPUs that it asked for, of the fastest kind.
    """

    arrival_s: float
    gpus: int
    seconds_on: Mapping[str, float]
    speeds: Mapping[tuple[str, int], float]

    @property
    def asked(self) -> float:
        """Share of the job per second as it was asked for."""
        return 1 / min(self.seconds_on.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a policy makes of a trace; completion is from arrival to end."""

    policy: str
    mean_completion_s: float
    max_completion_s: float
    makespan_s: float
    gpu_hours: float

    @classmethod
    def of(cls, policy: str, stays_s: Sequence[tuple[float, float]], gpu_s: float) -> Replay:
        """From each job's arrival and end, and the GPU seconds of all."""
        completion_s = [end_s - arrival_s for arrival_s, end_s in stays_s]
        return cls(
            policy=policy,
            mean_completion_s=mean(completion_s),
            max_completion_s=max(completion_s),
            makespan_s=max(end_s for _, end_s in stays_s),
            gpu_hours=gpu_s / 3600,
        )


def read_rates(paths: Sequence[Path]) -> Rates:
    """Tables in Gavel's layout, joined; jobs that share GPUs are left out.

    A folder stands for each ``gavel.json`` below it.
    """
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for path in (one for given in paths for one in sorted(given.rglob("gavel.json")) or [given]):
        try:
            if path.is_dir():
                raise ValueError("no gavel.json in this folder or below it")
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
    """The job in a line; ValueError for a wrong line, or if it runs on no GPU of the cluster."""
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
    speeds = _speeds(kind, steps * gpus, rates)
    return Job(arrival_s=arrival_s, gpus=gpus, seconds_on=seconds, speeds=speeds)


def _speeds(kind: str, steps: int, rates: Rates) -> dict[tuple[str, int], float]:
    """Share of a job done per second, by kind and number of GPUs, with its best batch.

    ``steps``: of one replica, so that the job has steps * batch samples.
    """
    model, batch = _model(kind)
    speeds = dict[tuple[str, int], float]()
    for (name, count), by_gpu in rates.items():
        other, size = _model(name)
        if other == model:
            for gpu, rate in by_gpu.items():
                speed = rate * count * size / (steps * batch)
                if speed:
                    speeds[gpu, count] = max(speed, speeds.get((gpu, count), 0.0))
    return speeds


def _model(kind: str) -> tuple[str, int]:
    """The model of a job type, and its batch of a replica."""
    match = BATCH.fullmatch(kind)
    return (match[1], int(match[2])) if match else (kind, 1)
