"""Log a training: a run per family and learner, with dataset, model, trials and champion."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.eval.tracking import registry, store, studies, views
from itercast.eval.tracking.logs import iterations_experiment
from itercast.learners.bundle import Bundle
from itercast.learners.held_out import load_held_out
from itercast.learners.models.compared import BLEND, NAMES

SHOWN_DIGITS = 2  # after the point of a logged metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training: what was scored (``TrainReport.to_dict``), on which device, and its bundle."""

    report: Mapping[str, Any]
    device: str
    bundle: Path
    data: Sequence[Path]
    time_ms: int

    @property
    def name(self) -> str:
        """The bundle and the time, as runs show it."""
        when = pd.Timestamp(self.time_ms, unit="ms").strftime("%Y-%m-%d %H:%M")
        return f"{self.bundle} {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One learner's errors on an op family; ``rank`` 1 has the smallest median error.

    ``metrics``: errors in % by name (``itercast.learners.train.errors``). ``runner_up``: the
    learner one rank below with its median error, as text; empty for the last.
    """

    family: str
    learner: str
    metrics: Mapping[str, float]
    rank: int
    runner_up: str


def ranked(family: str, scores: Mapping[str, Mapping[str, float]]) -> list[Scored]:
    """The learners of a family by their median error, the best first."""
    order = sorted(scores, key=lambda name: scores[name]["median_ape_pct"])
    after = [f"{name} {scores[name]['median_ape_pct']:.1f} %" for name in order[1:]]
    return [
        Scored(family=family, learner=name, metrics=scores[name], rank=rank, runner_up=next_one)
        for rank, (name, next_one) in enumerate(zip(order, [*after, ""], strict=True), start=1)
    ]


def log_fit(
    report: Mapping[str, Any], device: str, bundle: Path, data: Sequence[Path] = ()
) -> None:
    """Log a training to experiment ops/<device>: a run per family and learner, best learner first.

    ``report``: scores by family (``TrainReport.to_dict``). The ensemble that a bundle holds,
    learner "blend", is registered as model ``<device>.<family>``;
    ``itercast.eval.tracking.registry`` says when it becomes the champion.
    """
    client, time_ms = store.connect(), store.now_ms()
    training = Training(report=report, device=device, bundle=bundle, data=data, time_ms=time_ms)
    note = description(training, iterations_experiment(client))
    place = store.experiment(client, f"ops/{device}", views.OPS, note)
    held_out, whole = load_held_out(bundle), Bundle.load(bundle)
    before = previous_medians(client, place)
    for family in sorted(report):
        entry, mine = report[family], held_out[held_out["family"] == family]
        digest = whole.models[family].facts["digest"]
        inputs = datasets(training, family, entry, digest, mine)
        for one in reversed(ranked(family, entry["learners"])):  # the latest is listed first
            time_ms += 1
            run = log_learner(client, place, training, one, entry, inputs, time_ms, before)
            if one.learner == BLEND:
                registry.offer(client, run, device, family, whole, mine)
                studies.log_trials(client, place, run.run_id, family, digest)


def previous_medians(client: Any, experiment: str) -> dict[tuple[str, str], float]:
    """Median error in % by (family, learner), from the latest run of each that is logged."""
    found: dict[tuple[str, str], float] = {}
    order = ["attributes.start_time DESC"]
    for run in client.search_runs(
        [experiment], "metrics.rank > 0", max_results=1000, order_by=order
    ):
        tags = run.data.tags
        key = tags.get("family", ""), tags.get("learner", "")
        found.setdefault(key, run.data.metrics["median_ape_pct"])
    return found


def log_learner(
    client: Any,
    experiment: str,
    training: Training,
    one: Scored,
    entry: Mapping[str, Any],
    inputs: Sequence[Any],
    start_ms: int,
    before: Mapping[tuple[str, str], float],
) -> registry.LoggedRun:
    """Log one learner's run and model; its metrics name the held-out rows as their dataset.

    ``entry``: the family's part of the report; ``inputs``: what ``datasets`` returned; ``before``:
    median errors of the previous training.
    """
    from mlflow.entities import LoggedModelOutput, Metric

    colour = views.COLOURS[NAMES.index(one.learner) % len(views.COLOURS)]
    tags = {
        "family": one.family,
        "learner": one.learner,
        "device": training.device,
        "training": training.name,
        "bundle": str(training.bundle),
        "mlflow.runColor": colour,
        **({"runner_up": one.runner_up} if one.runner_up else {}),
    }
    name = f"{one.family} · {one.learner}"
    run = client.create_run(experiment, start_time=start_ms, tags=tags, run_name=name)
    model = client.create_logged_model(
        experiment, f"{one.family}-{one.learner}", run.info.run_id, tags, model_type=one.learner
    )
    test = inputs[-1].dataset
    metrics = [
        Metric(key, value, start_ms, 0, model.model_id, test.name, test.digest, run.info.run_id)
        for key, value in shown_metrics(one, entry, before).items()
    ]
    client.log_inputs(run.info.run_id, inputs)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, 0)])
    client.log_batch(run.info.run_id, metrics=metrics)
    client.finalize_logged_model(model.model_id, "READY")
    client.set_terminated(run.info.run_id, end_time=start_ms)
    return registry.LoggedRun(run_id=run.info.run_id, model_id=model.model_id)


def shown_metrics(
    one: Scored, entry: Mapping[str, Any], before: Mapping[tuple[str, str], float]
) -> dict[str, float]:
    """The metrics of a run: errors in %, rank, rows, noise floor, change of the median error."""
    found = dict(one.metrics)
    if entry.get("retest_ape_pct") is not None:
        found["retest_ape_pct"] = entry["retest_ape_pct"]
    if one.learner == BLEND and entry.get("coverage_pct") is not None:
        found["coverage_pct"] = entry["coverage_pct"]
    old = before.get((one.family, one.learner))
    if old is not None:
        found["change_pct"] = one.metrics["median_ape_pct"] - old
    rounded = {name: round(float(value), SHOWN_DIGITS) for name, value in found.items()}
    return {**rounded, "rank": float(one.rank), "rows": float(entry["rows"])}


def datasets(
    training: Training,
    family: str,
    entry: Mapping[str, Any],
    digest: str,
    held_out: pd.DataFrame,
) -> list[Any]:
    """MLflow dataset inputs of a family: the training rows, then the held-out rows, by digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    from itercast.learners.train import digest_of

    def one(name: str, context: str, digest: str, facts: Mapping[str, Any], columns: Any) -> Any:
        found = Dataset(
            name=name,
            digest=digest,
            source_type="local",
            source=json.dumps({"uri": ", ".join(map(str, training.data)) or str(training.bundle)}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps(facts),
        )
        return DatasetInput(found, [InputTag("mlflow.data.context", context)])

    kinds = {"f": "double", "i": "long", "b": "boolean"}
    columns = [
        {"name": str(name), "type": kinds.get(dtype.kind, "string")}
        for name, dtype in held_out.dtypes.items()
    ]
    return [
        one(f"{family}-rows", "training", digest, {"num_rows": entry["rows"]}, columns[:0]),
        one(
            f"{family}-held-out",
            "validation",
            digest_of(held_out),
            {"num_rows": len(held_out)},
            columns,
        ),
    ]


def description(training: Training, iterations: str) -> str:
    """The experiment's description: the best learner of each family, and what to look at."""
    report = training.report
    best = Counter(ranked(family, entry["learners"])[0].learner for family, entry in report.items())
    answers = [f"{learner} in {count}" for learner, count in best.most_common()]
    learners = [n for n in reversed(NAMES) if any(n in e["learners"] for e in report.values())]
    lines = [
        f"| family | {' | '.join(learners)} | measured twice |",
        f"|---|{'--:|' * (len(learners) + 1)}",
        *(_line(family, report[family], learners) for family in sorted(report)),
    ]
    return store.note(
        "ops",
        device=training.device,
        training=training.name,
        answers=f"{', '.join(answers)} of {len(report)} families",
        table="\n".join(lines),
        iterations=iterations,
    )


def _line(family: str, entry: Mapping[str, Any], learners: Sequence[str]) -> str:
    """A line of the description's table."""
    medians = {name: scores["median_ape_pct"] for name, scores in entry["learners"].items()}
    best, floor = min(medians.values()), entry.get("retest_ape_pct")
    texts = [f"{medians[n]:.1f}" if n in medians else "" for n in learners]
    cells = [
        f"**{t}**" if medians.get(n) == best else t for n, t in zip(learners, texts, strict=True)
    ]
    return f"| {family} | {' | '.join(cells)} | {'' if floor is None else f'{floor:.1f}'} |"
