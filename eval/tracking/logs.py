"""Log comparisons, benchmarks and plan searches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from itercast.eval.tracking import store
from itercast.microbench.store import Facts
from itercast.microbench.sweep.cards import commit

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

ITERATIONS = "iterations"
REPORT = "report"  # the run of a comparison that has its page


def iterations_experiment(client: MlflowClient) -> str:
    """The id of the experiment of whole iterations, which is made if there is none."""
    experiment = client.get_experiment_by_name(ITERATIONS)
    note = "" if experiment else store.note(ITERATIONS, latest="Nothing compared yet")
    return store.experiment(client, ITERATIONS, note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Compared iterations of one kind of plan on one GPU: their errors, and a row per case.

    ``warning``: what is off by more than chance, in words.
    """

    kind: str
    gpu: str
    metrics: Mapping[str, float]
    cases: pd.DataFrame
    warning: str = ""


def log_evaluation(
    name: str,
    groups: Sequence[Group],
    facts: Mapping[str, str],
    plans: Mapping[str, float],
    folder: Path,
    begin_ms: int,
) -> None:
    """Log a comparison to experiment iterations: a run per group, and one with the report.

    ``facts``: bundle, data, digest of the measured rows, stack, learner, source. ``plans``: how
    well plans are ranked. Runs of earlier comparisons of these groups lose the tag ``newest``.
    """
    client = store.connect()
    place = iterations_experiment(client)
    source = {"mlflow.source.name": facts["source"], "mlflow.source.git.commit": commit()}
    shared = {name: value for name, value in facts.items() if name != "source"}
    tags = {**source, "learner": facts["learner"], "kind": REPORT}
    report = store.log_run(client, place, f"{name} · {REPORT}", tags, plans, shared, begin_ms)
    client.log_artifacts(report, str(folder))
    link = f"[report](#/experiments/{place}/runs/{report}/artifacts?{store.TRAINING_VIEW})"
    rows = sum(len(group.cases) for group in groups)
    measured = ("measured-iterations", "validation", facts["digest"], facts["data"], rows)
    inputs = [dataset_input(*measured)]
    for group in groups:
        own = {"kind": group.kind, "gpu": group.gpu, "learner": facts["learner"]}
        no_longer_newest(client, place, own)
        tags = {**source, **own, "newest": "yes", "report": report, "warning": group.warning}
        tags[store.NOTE] = f"{group.warning} The {link} has all groups.".strip()
        params = {**shared, **own, "cases": len(group.cases)}
        title = f"{name} · {group.kind} · {group.gpu}"
        run = store.log_run(client, place, title, tags, group.metrics, params, begin_ms)
        client.log_inputs(run, inputs)
        client.log_table(run, group.cases, "cases.json")
    latest = f"Latest comparison: {link}"
    client.set_experiment_tag(place, store.NOTE, store.note(ITERATIONS, latest=latest))


def no_longer_newest(client: MlflowClient, place: str, own: Mapping[str, str]) -> None:
    """Take the tag ``newest`` off the runs with these tags."""
    where = " and ".join([store.NEWEST, *(f"tags.{k} = '{v}'" for k, v in own.items())])
    for run in client.search_runs([place], where):
        client.delete_tag(run.info.run_id, "newest")


def dataset_input(
    name: str,
    context: str,
    digest: str,
    source: str,
    rows: int,
    columns: Sequence[Mapping[str, str]] = (),
) -> DatasetInput:
    """An MLflow dataset input for measured rows: where they are, and what they are used for."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=name,
        digest=digest,
        source_type="local",
        source=json.dumps({"uri": source}),
        schema=json.dumps({"mlflow_colspec": list(columns)}),
        profile=json.dumps({"num_rows": rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def log_bench(scores: Sequence[tuple[str, str, str, Mapping[str, float]]], folder: Path) -> None:
    """Log the public benchmark to experiment public: a run for each of ``scores``.

    A score is (line of the table, part of it, learner, metrics); ``folder``: the report.
    """
    client = store.connect()
    place = store.experiment(client, "public", store.note("public"))
    client.log_artifacts(store.log_run(client, place, folder.name), str(folder))
    for line, part, learner, metrics in scores:
        tags = {"line": line, "part": part, "learner": learner}
        store.log_run(client, place, f"{line} · {part} · {learner}", tags, metrics)


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
