"""Log fits, comparisons, benchmarks and plan searches to MLflow; only this file imports MLflow."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.ranking import ranking_metrics
from eval.results import CaseResult, LineResult, summary

DEFAULT_URI = "sqlite:///mlflow.db"


def tracking_uri() -> str:
    """The URI of the MLflow store: MLFLOW_TRACKING_URI, or SQLite in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def _mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow  # lazy: forecasts must not pay for it

    mlflow.set_tracking_uri(tracking_uri())
    return mlflow


def _experiment(mlflow: Any, name: str) -> str:
    """Find or create an experiment; returns its id. SQLite stores keep artifacts in mlartifacts."""
    known = mlflow.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    place = Path("mlartifacts").resolve().as_uri() if "sqlite" in tracking_uri() else None
    return str(mlflow.create_experiment(name, artifact_location=place))


def log_fit(report: Mapping[str, Any], gpu: str, bundle: Path) -> None:
    """Log a fit to experiment ops/<gpu>: a parent run, and a nested run per family and learner."""
    mlflow = _mlflow()
    experiment = _experiment(mlflow, f"ops/{gpu}")
    with mlflow.start_run(experiment_id=experiment, run_name=f"fit {bundle.name}"):
        mlflow.log_param("bundle", str(bundle))
        for family, entry in report.items():
            for learner, scores in entry["learners"].items():
                with mlflow.start_run(
                    experiment_id=experiment, run_name=f"{family}/{learner}", nested=True
                ):
                    mlflow.set_tags({"family": family, "learner": learner, "gpu": gpu})
                    mlflow.log_param("rows", entry["rows"])
                    extra = {"retest_ape_pct": entry["retest_ape_pct"]}
                    if learner == "xgboost":
                        extra["coverage_pct"] = entry["coverage_pct"]
                    known = {k: v for k, v in extra.items() if v is not None}
                    mlflow.log_metrics({**scores, **known})


def log_evaluation(results: Sequence[CaseResult], folder: Path) -> None:
    """Log a comparison to experiment iterations as one run, with the report as artifacts."""
    mlflow = _mlflow()
    experiment = _experiment(mlflow, "iterations")
    with mlflow.start_run(experiment_id=experiment, run_name=folder.name):
        mlflow.log_metrics({**summary(results), **ranking_metrics(results)})
        for result in results:
            name = re.sub(r"[^A-Za-z0-9_. -]", "", f"error_pct.{result.label}")
            mlflow.log_metric(name, result.error_pct)
        mlflow.log_artifacts(str(folder))


def log_bench(results: Sequence[LineResult], folder: Path) -> None:
    """Log the public benchmark to experiment ops/all: a nested run per line, part and learner."""
    mlflow = _mlflow()
    experiment = _experiment(mlflow, "ops/all")
    with mlflow.start_run(experiment_id=experiment, run_name=folder.name):
        mlflow.log_artifacts(str(folder))
        for r in results:
            for learner, scores in r.scores.items():
                with mlflow.start_run(
                    experiment_id=experiment, run_name=f"{r.line}/{r.part}/{learner}", nested=True
                ):
                    mlflow.set_tags({"line": r.line, "part": r.part, "learner": learner})
                    mlflow.log_metrics(dict(scores))


def log_active(gpu: str, passes: Mapping[str, Sequence[Mapping[str, float]]], folder: Path) -> None:
    """Log a replay to experiment ops/<gpu>: a nested run per strategy; steps are sweep seconds."""
    mlflow = _mlflow()
    experiment = _experiment(mlflow, f"ops/{gpu}")
    with mlflow.start_run(experiment_id=experiment, run_name="active sweep"):
        mlflow.log_artifacts(str(folder))
        for strategy, some in passes.items():
            with mlflow.start_run(experiment_id=experiment, run_name=strategy, nested=True):
                for one in some:
                    metrics = {name: float(value) for name, value in one.items()}
                    mlflow.log_metrics(metrics, step=round(60 * metrics["minutes"]))


def ui_command() -> list[str]:
    """The command that starts the MLflow UI; one worker, so that it starts quickly."""
    store = ["--backend-store-uri", tracking_uri(), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "ui", *store]


def log_plans(facts: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> None:
    """Log a plan search to experiment plans: a nested run per plan, the best first."""
    mlflow = _mlflow()
    experiment = _experiment(mlflow, "plans")
    name = f"{facts['case']} on {facts['gpus']} x {facts['gpu']}"
    with mlflow.start_run(experiment_id=experiment, run_name=name):
        mlflow.log_params(dict(facts))
        mlflow.log_dict({**facts, "plans": list(plans)}, "plans.json")
        for place, plan in enumerate(plans, start=1):
            with mlflow.start_run(experiment_id=experiment, run_name=plan["plan"], nested=True):
                mlflow.log_params({"plan": plan["plan"], "gpu": plan["gpu"], "place": place})
                numbers = {k: float(v) for k, v in plan.items() if isinstance(v, int | float)}
                idle = {f"idle_{k}_us": us for k, us in plan["idle_by_us"].items()}
                mlflow.log_metrics({**numbers, **idle})
