"""Answers ``predict --cluster`` and ``plan --cluster``, whose commands find it by entry points."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from itercast.capture.plan import ParallelPlan
from itercast.compose.target import find_target
from itercast.extras.clusters.file import read_cluster
from itercast.extras.clusters.search import job_on, plans_on_cluster, predict_on_cluster
from itercast.options import Question
from itercast.stated import options, stated

if TYPE_CHECKING:
    from itercast.compose.forecast import Forecast
    from itercast.microbench.store import Row

NOT_OF_CLUSTERS = ("gpu", "lengths", "packed", "machine")  # arguments of ``itercast.api.predict``


def predict(question: Question, cluster: Path) -> tuple[Forecast, Row]:
    """The forecast on the GPUs of a cluster file, and the settings that ``--json`` prints with it.

    Replicas have batches of unlike sizes: ``batch`` of ``step`` is their mean.
    """
    arguments = {k: v for k, v in question.arguments().items() if k not in NOT_OF_CLUSTERS}
    forecast = predict_on_cluster(question.asked(), cluster, **arguments)
    plan, batch = (
        ParallelPlan.parse(forecast.plan),
        question.replica_batch() or question.case_defaults.batch,
    )
    names = {group.gpu for group in read_cluster(cluster).groups} - {"cpu"}
    gpus = [find_target(name, "", question.bundle).gpu for name in names]
    seq, own = question.seq_asked(), question.case_defaults
    settings = {**options(question), "plan": forecast.plan, "bundle": forecast.bundle, "gpu": ""}
    settings |= {"dtype": question.dtype_on(gpus), "cluster": cluster}
    settings |= {"optimizer": question.optimizer or own.optimizer}
    settings |= {"batch": batch, "seq": seq, "global_batch": None}
    size = {"batch": batch, "replicas": plan.dp, "global_batch": batch * plan.dp}
    size |= {"microbatches": plan.microbatches, "seq": seq}
    return forecast, {**stated(settings), "step": size, "unusual": []}


def plan(question: Question, cluster: Path, given: Row) -> tuple[list[Forecast], Row, Row]:
    """The best plans on the GPUs of a file, the values of all options, and how many were tried."""
    samples = question.samples_over(read_cluster(cluster).gpus)
    job = job_on(question.asked(), cluster, global_batch=samples, **given)
    forecasts, tried = plans_on_cluster(job, amp=given["amp"])
    if not forecasts:
        raise ValueError(f"no legal plan of {question.name} on the groups of {cluster}")
    settled = {"global_batch": job.samples, "seq": job.seq, "dtype": job.dtype}
    settled |= {"optimizer": job.optimizer, "bundle": forecasts[0].bundle}
    counts = {"gpus": job.cluster.gpus, "considered": tried, "simulated": tried}
    return forecasts, {**given, **settled}, counts
