"""Log a training: a run per family and learner, with dataset, model, trials and champion."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pandas as pd

from itercast.eval.tracking import open_run, registry, store
from itercast.eval.tracking.logs import dataset_input, iterations_experiment, no_longer_newest
from itercast.learners.bundle import Bundle
from itercast.learners.held_out import load_held_out
from itercast.learners.models.compared import BLEND, PHYSICS
from itercast.microbench.store import Facts
from itercast.microbench.sweep.cards import commit

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

PAGE = "held_out.html"  # artifact of the run that prices a family
COMPARED = ("median_ape_pct", "bias_pct", "retest_ape_pct", "seconds")  # of a family, there
SHOWN_DIGITS = 2  # after the point of a logged metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training: its scores (``TrainReport.to_dict``), device, bundle, roots of rows, and end.

    ``time_ms``: ms since 1970.
    """

    report: Facts
    device: str
    bundle: Path
    data: Sequence[Path]
    time_ms: int

    @property
    def name(self) -> str:
        """The bundle and the time, as runs show it."""
        when = pd.Timestamp(self.time_ms, unit="ms").strftime("%Y-%m-%d %H:%M")
        return f"{self.bundle} {when}"

    @property
    def source(self) -> str:
        """Where its rows are: the roots, or the bundle if they are not known."""
        return ", ".join(map(str, self.data)) or str(self.bundle)


def log_fit(
    report: Facts,
    device: str,
    bundle: Path,
    data: Sequence[Path] = (),
    page: Callable[[pd.DataFrame], str] | None = None,
) -> None:
    """Log a training to experiment ops/<device>: a run per family and learner.

    ``report``: scores by family (``TrainReport.to_dict``); ``data``: roots that were trained on.
    The bundle's learner of a family, the blend, is registered as model ``<device>.<family>``;
    ``itercast.eval.tracking.registry`` says when it becomes the champion. Runs of earlier trainings
    of these families lose the tag ``newest``. ``page``: draws the held-out forecasts of a family,
    an artifact of the run that prices it.
    """
    client, time_ms = store.connect(), store.now_ms()
    training = Training(report=report, device=device, bundle=bundle, data=data, time_ms=time_ms)
    facts = {"device": device, "training": training.name}
    note = store.note("ops", **facts, iterations=iterations_experiment(client))
    place = store.experiment(client, f"ops/{device}", note)
    held_out, trained = load_held_out(bundle), Bundle.load(bundle)
    verdicts = dict[str, registry.Verdict]()
    for family, entry in sorted(report.items()):
        forecasts = held_out[held_out["family"] == family]
        digest = trained.models[family].facts["digest"]
        inputs = datasets(training, family, entry, digest, forecasts)
        no_longer_newest(client, place, {"family": family})
        for learner in entry["learners"]:
            run = log_learner(client, place, training, family, learner, inputs)
            if learner == BLEND:
                log_trials(client, place, run.run_id, family, entry.get("trials", ()))
                if page:
                    client.log_text(run.run_id, page(forecasts), PAGE)
                verdict = registry.offer(client, run, device, family, trained, forecasts)
                verdicts[family] = verdict
    log_overview(client, training, trained, verdicts)


def log_overview(
    client: MlflowClient,
    training: Training,
    trained: Bundle,
    verdicts: Mapping[str, registry.Verdict],
) -> None:
    """Log rows, errors by family and verdicts to the run that ``open_run`` made of this training.

    The first metric, which MLflow draws where trainings are compared, is the mean over families.
    A verdict that no family has is logged as 0: MLflow shows gaps as NaN.
    """
    from mlflow.entities import Metric, Param

    run = _open_run_id(client, str(training.bundle))
    if not run:  # it could not be logged when the training began
        return
    report = training.report
    digests = [str(trained.models[family].facts["digest"]) for family in sorted(report)]
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:12]
    rows = sum(entry["rows"] for entry in report.values())
    client.log_inputs(run, [dataset_input("rows", "training", digest, training.source, rows)])
    families_by_verdict = Counter(verdict.word for verdict in verdicts.values())
    by_family: dict[str, float] = {}
    for family, entry in report.items():
        scores = {**shown_metrics(BLEND, entry), "seconds": entry["seconds"]}
        by_family |= {f"{key}/{family}": scores[key] for key in COMPARED if key in scores}
    errors = [value for key, value in by_family.items() if key.startswith("median_ape_pct/")]
    numbers = {"median_ape_pct": fmean(errors)} if errors else {}
    numbers |= {"rows": rows, **by_family}
    numbers |= {f"verdicts/{word}": families_by_verdict[word] for word in registry.WORDS}
    params = {"device": training.device, "families": ", ".join(sorted(report)), "digest": digest}
    params["gpus"] = ", ".join(sorted(trained.gpus))
    now, digits = training.time_ms, SHOWN_DIGITS
    metrics = [Metric(key, round(value, digits), now, 0) for key, value in numbers.items()]
    client.log_batch(run, metrics, [Param(key, text) for key, text in params.items()])
    words = "; ".join(f"{family}: {v.word}" for family, v in sorted(verdicts.items()))
    client.set_tag(run, "verdict", words)


def _open_run_id(client: MlflowClient, name: str) -> str:
    """The id of the newest run of this name that ``open_run`` made; empty where there is none."""
    experiment = client.get_experiment_by_name(open_run.EXPERIMENT)
    if experiment is None:
        return ""
    newest_first = ["attributes.start_time DESC"]
    runs = client.search_runs([experiment.experiment_id], order_by=newest_first)
    return next((run.info.run_id for run in runs if run.info.run_name == name), "")


def _tags(training: Training, entry: Facts, learner: str) -> dict[str, str]:
    """Tags of a training's runs; that of the blend, which prices the family, has two more."""
    of_blend = {}
    if learner == BLEND:
        of_blend = {"prices": "yes", "coverage_pct": f"{entry.get('coverage_pct') or 0:.0f}"}
    return {
        "training": training.name,
        "bundle": str(training.bundle),
        "newest": "yes",
        "mlflow.source.name": "itercast train",
        "mlflow.source.git.commit": commit(),
        **of_blend,
    }


def log_learner(
    client: MlflowClient,
    experiment: str,
    training: Training,
    family: str,
    learner: str,
    inputs: Sequence[DatasetInput],
) -> registry.LoggedRun:
    """Log one learner's run and model; its metrics name the held-out rows as their dataset.

    ``inputs``: what ``datasets`` returned. The run lasts as long as the learner took.
    """
    from mlflow.entities import LoggedModelOutput, Metric, Param

    entry, end_ms = training.report[family], training.time_ms
    facts = {"family": family, "learner": learner, "device": training.device}
    tags = {**facts, **_tags(training, entry, learner)}
    took_s = entry.get("learner_seconds", {}).get(learner, entry["seconds"])
    start_ms = end_ms - max(1, round(1000 * took_s))
    run = client.create_run(experiment, start_ms, tags, run_name=f"{family} · {learner}")
    run_id = run.info.run_id
    model = client.create_logged_model(
        experiment, f"{family}-{learner}", run_id, tags, model_type=learner
    )
    test = inputs[-1].dataset
    metrics = [
        Metric(key, value, end_ms, 0, model.model_id, test.name, test.digest, run_id)
        for key, value in shown_metrics(learner, entry).items()
    ]
    own = entry["parameters"] if learner in (BLEND, PHYSICS) else {}
    params = [Param(key, str(value)) for key, value in {**facts, **own}.items()]
    client.log_inputs(run_id, inputs)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    client.log_batch(run_id, metrics=metrics, params=params)
    client.finalize_logged_model(model.model_id, "READY")
    client.set_terminated(run_id, end_time=end_ms)
    return registry.LoggedRun(run_id=run_id, model_id=model.model_id)


def log_trials(
    client: MlflowClient, experiment: str, parent: str, family: str, trials: Sequence[Facts]
) -> None:
    """Log each finished Optuna trial as a child of run ``parent``.

    ``trials``: see ``itercast.learners.models.trees.Tuned``.
    """
    for trial in trials:
        number = str(trial["number"])
        tags = {store.PARENT: parent, "family": family, "trial": number}
        metrics = {"mean_log_error_pct": 100 * trial["value"]}
        params = {k: f"{v:.4g}" for k, v in trial["params"].items()}
        store.log_run(client, experiment, f"{family} · trial {number}", tags, metrics, params)


def shown_metrics(learner: str, entry: Facts) -> dict[str, float]:
    """Metrics of a learner's run: errors in %, rank, rows, held-out shapes, noise floor."""
    metrics = {**entry["learners"][learner], "rows": entry["rows"]}
    metrics["shapes"] = entry.get("shapes", 0)
    if entry.get("retest_ape_pct") is not None:
        metrics["retest_ape_pct"] = entry["retest_ape_pct"]
    return {name: round(float(value), SHOWN_DIGITS) for name, value in metrics.items()}


def datasets(
    training: Training, family: str, entry: Facts, digest: str, held_out: pd.DataFrame
) -> list[DatasetInput]:
    """MLflow dataset inputs of a family: the training rows, then the held-out rows, by digest."""
    from itercast.learners.train import digest_of

    type_of_kind = {"f": "double", "i": "long", "b": "boolean"}
    columns = [
        {"name": str(name), "type": type_of_kind.get(dtype.kind, "string")}
        for name, dtype in held_out.dtypes.items()
    ]
    rows = dataset_input(f"{family}-rows", "training", digest, training.source, entry["rows"])
    facts = (digest_of(held_out), training.source, len(held_out), columns)
    return [rows, dataset_input(f"{family}-held-out", "validation", *facts)]
