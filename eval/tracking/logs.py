"""Log comparisons, benchmarks, replays of sweeps and plan searches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from itercast.eval.tracking import store
from itercast.microbench.store import Facts

if TYPE_CHECKING:
    from mlflow import MlflowClient

ITERATIONS = "iterations"
RANKS = ((1, "1st"), (2, "2nd"))  # of two compared bundles


def iterations_experiment(client: MlflowClient) -> str:
    """The id of the experiment of whole iterations, which is made if there is none."""
    known = client.get_experiment_by_name(ITERATIONS)
    note = "" if known else store.note(ITERATIONS, latest="Nothing compared yet")
    return store.experiment(client, ITERATIONS, note)


def log_evaluation(
    name: str,
    device: str,
    metrics: Mapping[str, float],
    errors_pct: Mapping[str, float],
    folder: Path,
    learner: str = "blend",
) -> None:
    """Log a comparison to experiment iterations as one run, with its folder as artifacts.

    ``errors_pct``: the signed error of each case.
    """
    client = store.connect()
    place = iterations_experiment(client)
    cases = {
        re.sub(r"[^A-Za-z0-9_. -]", "", f"error_pct.{label}"): value
        for label, value in errors_pct.items()
    }
    tags = {"device": device, "learner": learner}
    run = store.log_run(client, place, name, tags, {**metrics, **cases})
    client.log_artifacts(run, str(folder))
    latest = f"[Report of the latest comparison](#/experiments/{place}/runs/{run}/artifacts)"
    client.set_experiment_tag(place, store.NOTE, store.note(ITERATIONS, latest=latest))


def log_bench(scores: Sequence[tuple[str, str, str, Mapping[str, float]]], folder: Path) -> None:
    """Log the public benchmark to experiment public: a run for each of ``scores``.

    A score is line, part, learner and metrics.
    """
    client = store.connect()
    place = store.experiment(client, "public", store.note("public"))
    client.log_artifacts(store.log_run(client, place, folder.name), str(folder))
    for line, part, learner, metrics in scores:
        tags = {"line": line, "part": part, "learner": learner}
        store.log_run(client, place, f"{line} · {part} · {learner}", tags, metrics)


def log_compared(first: Path, second: Path, found: Sequence[Facts]) -> None:
    """Log the errors in % of two bundles by family and GPU to experiment compared, as one run."""
    client = store.connect()
    place = store.experiment(client, "compared", store.note("compared"))
    numbers = {
        re.sub(r"[^\w. /-]", "", f"{one['family']}/{one['gpu']}/{name}"): error
        for one in found
        for (_, name), error in zip(RANKS, one["errors_pct"], strict=True)
    }
    counts = {f"{name}_better": sum(one["better"] == n for one in found) for n, name in RANKS}
    tags = {"first": str(first), "second": str(second)}
    store.log_run(client, place, f"{first.name} against {second.name}", tags, numbers | counts)


def log_plans(facts: Facts, plans: Sequence[Facts]) -> None:
    """Log a plan search to experiment plans: a run, and below it one per plan, the best first."""
    client = store.connect()
    place = store.experiment(client, "plans", store.note("plans"))
    name = f"{facts['case']} on {facts['gpus']} x {facts['gpu']}"
    search = store.log_run(client, place, name, params=facts)
    client.log_dict(search, {**facts, "plans": list(plans)}, "plans.json")
    for number, plan in enumerate(plans, start=1):
        numbers = {k: float(v) for k, v in plan.items() if isinstance(v, int | float)}
        idle = {f"idle_{k}_us": us for k, us in plan["idle_by_us"].items()}
        params = {"plan": plan["plan"], "gpu": plan["gpu"], "place": number}
        parent = {store.PARENT: search}
        store.log_run(client, place, plan["plan"], parent, {**numbers, **idle}, params)
