"""Replays a trace of jobs on GPUs of several kinds, with and without a table of throughputs.

Jobs run to their end on GPUs of one kind, but where they are resized (``elastic``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from itercast.extras.schedulers.elastic import replay_elastic
from itercast.extras.schedulers.jobs import Job, Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How waiting jobs are chosen; ``knows``: the table's times on each kind of GPU are known.

    Jobs are placed in the order of arrival, or the shortest first. With knowledge a job goes where
    it ends first, without where it starts first. ``least_first``: the job with the least GPUs times
    seconds first (QSSF, arXiv:2109.01313).
    """

    knows: bool
    shortest_first: bool = False
    least_first: bool = False


POLICIES = {
    "fifo": Policy(knows=False),
    "fifo, best GPU": Policy(knows=True),
    "shortest first, best GPU": Policy(knows=True, shortest_first=True),
    "least GPU time first, best GPU": Policy(knows=True, least_first=True),
}


ELASTIC = "resized by the table"
NAMES = (*POLICIES, ELASTIC)


def replay(jobs: Sequence[Job], cluster: Mapping[str, int], name: str) -> Replay:
    """Run all jobs under a policy.

    Whenever a job arrives or ends, all waiting jobs are planned anew, each on the GPUs that are
    free first; those that can start now do.
    """
    if name == ELASTIC:
        return replay_elastic(jobs, cluster, name)
    policy, waiting = POLICIES[name], list(jobs)
    free_s = {gpu: [0.0] * count for gpu, count in cluster.items()}
    stays_s, gpu_s, now_s = list[tuple[float, float]](), 0.0, 0.0  # each job's arrival and end
    while waiting:
        planned = {gpu: list(times) for gpu, times in free_s.items()}
        arrived = [job for job in waiting if job.arrival_s <= now_s]
        if policy.shortest_first:
            arrived.sort(key=lambda job: min(job.seconds_on.values()))
        if policy.least_first:
            arrived.sort(key=lambda job: job.gpus * min(job.seconds_on.values()))
        for job in arrived:
            gpu, start_s = _place(job, planned, now_s, policy)
            _occupy(planned[gpu], job, start_s + job.seconds_on[gpu])
            if start_s <= now_s:
                _occupy(free_s[gpu], job, end_s := now_s + job.seconds_on[gpu])
                waiting.remove(job)
                stays_s.append((job.arrival_s, end_s))
                gpu_s += job.gpus * job.seconds_on[gpu]
        later = [t for times in free_s.values() for t in times if t > now_s]
        later += [job.arrival_s for job in waiting if job.arrival_s > now_s]
        now_s = min(later, default=now_s)
    return Replay.of(name, stays_s, gpu_s)


def _place(
    job: Job, free_s: Mapping[str, list[float]], now_s: float, policy: Policy
) -> tuple[str, float]:
    """Kind of GPU for a job, and when enough of it are free."""
    starts_s = {gpu: max(now_s, sorted(free_s[gpu])[job.gpus - 1]) for gpu in job.seconds_on}
    known = {gpu: job.seconds_on[gpu] if policy.knows else 0.0 for gpu in starts_s}
    return min(starts_s.items(), key=lambda item: item[1] + known[item[0]])


def _occupy(free_s: list[float], job: Job, until_s: float) -> None:
    """Give a job the GPUs that are free first."""
    free_s.sort()
    free_s[: job.gpus] = [until_s] * job.gpus
