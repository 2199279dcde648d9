"""Predicts and searches plans of a model on a cluster of unlike GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture, optimizer_of
from itercast.compose.forecast import Forecast
from itercast.compose.graph.launch_modes import engine_on, with_engine
from itercast.compose.plan_search.bounds import least_us
from itercast.compose.plan_search.candidates import Search, candidate_plans
from itercast.compose.plan_search.open_search import size_of
from itercast.compose.plan_search.sizes import CapturesBySize
from itercast.compose.predict import looking_up
from itercast.compose.target import Target, find_target, step_dtype
from itercast.extras.clusters.file import ClusterFile, read_cluster, subsets
from itercast.extras.clusters.job import Job
from itercast.extras.clusters.split import forecast_job
from itercast.microbench.store import Row


def job_on(
    model: Any,
    path: Path,
    *,
    gpus: int = 0,
    global_batch: int | None = None,
    seq: int | None = None,
    engine: str = "eager",
    indices: str = "",
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
    optimizer: str = "",
    **options: Any,
) -> Job:
    """A model's training on the cluster of a file; ValueError where its GPUs are unknown.

    ``global_batch``: samples of a step; without it a case has its own batch on each of ``gpus``.
    Other options are those of ``itercast.compose.capture_model.capture``.
    """
    file = read_cluster(path)
    samples, seq = size_of(model, gpus or file.gpus, global_batch, seq)
    options["optimizer"] = optimizer or optimizer_of(model)
    targets = _targets(file, bundle, host, stack)
    kinds = [target.gpu for target in targets.values()]
    options["dtype"] = step_dtype(options.get("dtype"), options.pop("amp", False), kinds)
    own = engine_on(next(iter(targets.values())).stack, engine)

    def capture_at(samples: int, length: int, autocast: bool) -> StepCapture:
        size: Row = {"batch": samples, "seq": length or None, "amp": autocast}
        step = capture(model, **size, **options)
        return with_engine(looking_up(step, indices), own)

    return Job(
        cluster=file,
        captures=CapturesBySize(capture_at),
        samples=samples,
        seq=seq,
        optimizer=options["optimizer"],
        dtype=options["dtype"] or "fp32",
        targets=targets,
    )


def _targets(file: ClusterFile, bundle: Path | None, host: str, stack: str) -> dict[str, Target]:
    """What each group of a cluster runs on, by its name."""
    targets = {}
    for group in file.groups:
        try:
            node = ParallelPlan(dp=file.gpus, node=group.node)
            target = find_target(group.gpu, node, bundle, host, stack)
        except ValueError as exc:
            raise ValueError(f"{file.path}: group {group.name!r}: {exc}") from None
        targets[group.name] = replace(target, threads=group.threads or target.threads)
    if len({target.gpu.kind for target in targets.values()}) > 1:
        raise ValueError(f"{file.path}: GPUs and CPUs do not train one model together here")
    return targets


def predict_on_cluster(
    model: Any, path: Path, plan: str = "", batch: int | None = None, **options: Any
) -> Forecast:
    """Forecast a step under a plan, split as balances best; ``batch`` of a replica, as a mean."""
    parsed = ParallelPlan.parse(plan)
    samples = batch * parsed.dp if batch else None
    options |= {"global_batch": samples, "gpus": parsed.dp, "amp": parsed.amp}
    return forecast_job(job_on(model, path, **options), parsed)


def plans_on_cluster(job: Job, count: int = 10, amp: bool = False) -> tuple[list[Forecast], int]:
    """The fastest plans on all or some groups of a cluster, and how many plans are legal.

    Bound of a plan: its least time if all GPUs were of the kind that runs it fastest. Plans are
    simulated in the order of bounds, until a bound is no better than the last of the best.
    """
    waiting = list[tuple[float, str, Job, ParallelPlan]]()
    for file in subsets(job.cluster):
        job_on_groups = replace(job, cluster=file)
        for bound_us, plan in _bounds(job_on_groups, amp):
            waiting.append((bound_us, f"{plan}", job_on_groups, plan))
    best, legal = list[Forecast](), 0
    for bound_us, _, job_on_groups, plan in sorted(waiting, key=lambda one: one[:2]):
        if len(best) == count and best[-1].fits and bound_us >= best[-1].iteration_us:
            break
        try:
            best.append(forecast_job(job_on_groups, plan))
        except ValueError:  # a stage or replica would be of several kinds
            continue
        legal += 1
        best = sorted(best, key=lambda one: (not one.fits, one.iteration_us))[:count]
    return best, legal


def _bounds(job: Job, amp: bool) -> Iterator[tuple[float, ParallelPlan]]:
    """Plans that search tries on so many equal GPUs, with their least time on any kind."""
    targets = {job.targets[g.name].gpu.name: job.targets[g.name] for g in job.cluster.groups}
    searches = [
        Search(
            capture_at=job.captures.capture_at,
            book=target.book,
            node=None,
            batch=job.samples,
            seq=job.seq,
            optimizer=job.optimizer,
            amp=amp,
        )
        for target in targets.values()
    ]
    roomiest = max(searches, key=lambda search: search.book.gpu.hbm_bytes)
    for search in searches:
        search.captures = roomiest.captures
    plans = list(candidate_plans(roomiest, job.cluster.gpus))
    for search in searches:
        search.announce(plans)
        search.price(plans)
    for plan in plans:
        ranks = [rank for search in searches if (rank := search.allowed(plan)) is not None]
        if len(ranks) == len(searches):
            yield min(map(least_us, ranks)), plan
