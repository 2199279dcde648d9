"""Replays a trace of jobs whose number of GPUs a scheduler may change while they run.

Whenever a job arrives or ends, a dynamic programme over the table of throughputs deals the GPUs to
the jobs in the system, in the order of arrival as many as there are GPUs: each gets so many of one
kind that the sum of their speeds, over those with the GPUs that they asked for, is largest (Saxena
et al., arXiv:2006.13878). A job that is resized stands still for a checkpoint and a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.extras.schedulers.jobs import Job, Replay

RESIZE_S: float = assumed(__file__, "resize_s")
Place = tuple[str, int]  # a kind of GPU, and how many
NOWHERE: Place = ("", 0)


@dataclass
class _Running:
    """A job in the system: the share of it that is left, where it runs, and since when."""

    job: Job
    left: float = 1.0
    place: Place = NOWHERE
    from_s: float = 0.0

    def speed(self, place: Place) -> float:
        """Share of the job per second on these GPUs."""
        return self.job.speeds.get(place, 0.0)

    def end_s(self) -> float:
        """When it ends if it stays where it is."""
        speed = self.speed(self.place)
        return self.from_s + self.left / speed if speed else np.inf

    def advance(self, now_s: float) -> None:
        """Subtract the share done since the last call, up to ``now_s``."""
        if now_s > self.from_s:
            self.left = max(0.0, self.left - (now_s - self.from_s) * self.speed(self.place))
            self.from_s = now_s

    def move(self, place: Place, now_s: float) -> None:
        """Go on elsewhere: after a pause, if it ran before."""
        if place != self.place:
            paused_s = RESIZE_S if self.left < 1 and place != NOWHERE else 0.0
            self.place, self.from_s = place, now_s + paused_s


def replay_elastic(jobs: Sequence[Job], cluster: Mapping[str, int], name: str) -> Replay:
    """Run all jobs; at each arrival and end GPUs are dealt to jobs anew."""
    coming = sorted(jobs, key=lambda job: job.arrival_s)
    inside, now_s, gpu_s = list[_Running](), 0.0, 0.0
    stays_s = list[tuple[float, float]]()  # each job's arrival and end
    while coming or inside:
        arrives_s = coming[0].arrival_s if coming else np.inf
        before_s, now_s = now_s, min([arrives_s, *(one.end_s() for one in inside)])
        for one in inside:
            gpu_s += one.place[1] * (now_s - before_s)
            one.advance(now_s)
        done = [one for one in inside if one.left <= 1e-9]
        stays_s += [(one.job.arrival_s, now_s) for one in done]
        inside = [one for one in inside if one.left > 1e-9]
        while coming and coming[0].arrival_s <= now_s:
            inside.append(_Running(coming.pop(0), from_s=now_s))
        admitted = inside[: sum(cluster.values())]
        for one, place in zip(admitted, best_places(admitted, cluster), strict=True):
            one.move(place, now_s)
    return Replay.of(name, stays_s, gpu_s)


def best_places(running: Sequence[_Running], cluster: Mapping[str, int]) -> list[Place]:
    """The places of jobs that maximise the sum of their speeds, each over the job's asked speed.

    An exact dynamic programme over the jobs and the numbers of GPUs of each kind that are used.
    """
    kinds = list(cluster)
    best = np.full([cluster[gpu] + 1 for gpu in kinds], -np.inf)
    best[(0,) * len(kinds)] = 0.0
    chosen = list[tuple[list[Place], np.ndarray]]()
    for one in running:
        places = [NOWHERE, *(p for p in one.job.speeds if p[1] <= cluster.get(p[0], 0))]
        sums = np.stack([_shifted(best, kinds, p) + one.speed(p) / one.job.asked for p in places])
        choice = sums.argmax(axis=0)
        best = np.take_along_axis(sums, choice[None], axis=0)[0]
        chosen.append((places, choice))
    at = list(np.unravel_index(int(best.argmax()), best.shape))
    found = list[Place]()
    for places, choice in reversed(chosen):
        gpu, count = places[int(choice[tuple(at)])]
        found.append((gpu, count))
        if count:
            at[kinds.index(gpu)] -= count
    return found[::-1]


def _shifted(best: np.ndarray, kinds: Sequence[str], place: Place) -> np.ndarray:
    """``best`` (sums of speeds by GPUs in use, an axis per kind) with ``place`` in use, too.

    Entries with fewer GPUs in use than ``place`` has are -inf.
    """
    gpu, count = place
    if not count:
        return best
    axis = kinds.index(gpu)
    shifted = np.full_like(best, -np.inf)
    to, source = [slice(None)] * best.ndim, [slice(None)] * best.ndim
    to[axis], source[axis] = slice(count, None), slice(None, best.shape[axis] - count)
    shifted[tuple(to)] = best[tuple(source)]
    return shifted
