"""The MLflow store: where it is, and experiments with descriptions."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"
NOTE = "mlflow.note.content"  # an experiment's description, in Markdown
PARENT = "mlflow.parentRunId"  # tag of a run below another
ARTIFACTS = "mlartifacts"  # folder beside a SQLite store
NOTES = Path(__file__).with_name("notes")
TRAINING_VIEW = "workflowType=machine_learning"  # MLflow opens its pages for apps without it
NEWEST = "tags.newest = 'yes'"  # runs of the newest training of each family


def tracking_uri() -> str:
    """The URI of the MLflow store: MLFLOW_TRACKING_URI, or SQLite in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def is_server(uri: str) -> bool:
    """Whether a URI is that of a tracking server, which keeps artifacts itself."""
    return uri.startswith(("http://", "https://"))


def connect() -> MlflowClient:
    """A client of the store at ``tracking_uri``; sets the environment that MLflow reads first."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would ask an outside host
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK", "true")  # they are pinned
    import mlflow  # lazy: forecasts must not pay for it
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1  # it would try a database that it cannot open for two minutes
    if tracking_uri().startswith("sqlite"):
        _write_ahead()
    mlflow.set_tracking_uri(tracking_uri())
    return mlflow.MlflowClient()


@cache
def _write_ahead() -> None:
    """Open SQLite in write-ahead mode (WAL): commits do not wait 10 ms for the disk."""
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "connect")
    def _(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):  # a process may use other databases too
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")


def now_ms() -> int:
    """The time in ms since 1970, as MLflow counts it."""
    return round(time.time() * 1000)


def log_run(
    client: MlflowClient,
    experiment: str,
    name: str,
    tags: Mapping[str, str] = MappingProxyType({}),
    metrics: Mapping[str, float] = MappingProxyType({}),
    params: Mapping[str, object] = MappingProxyType({}),
    start_ms: int | None = None,
    state: str = "FINISHED",
) -> str:
    """Log a run that has ended; returns its id. Metrics have three digits after the point."""
    from mlflow.entities import Metric, Param

    now = now_ms()
    run = client.create_run(experiment, start_ms or now, dict(tags), run_name=name).info.run_id
    shown = [Metric(key, round(float(value), 3), now, 0) for key, value in metrics.items()]
    client.log_batch(run, shown, [Param(key, str(value)) for key, value in params.items()])
    client.set_terminated(run, state)
    return str(run)


def experiment(client: MlflowClient, name: str, note: str) -> str:
    """Find or make an experiment and renew its description, unless empty; returns its id.

    Databases keep artifacts in the folder mlartifacts, tracking servers where they are told to.
    """
    known = client.get_experiment_by_name(name)
    if known is None:
        place = None if is_server(tracking_uri()) else Path(ARTIFACTS).resolve().as_uri()
        made = str(client.create_experiment(name, artifact_location=place, tags={NOTE: note}))
        _make_artifacts_relative(made)
        return made
    if note:
        client.set_experiment_tag(known.experiment_id, NOTE, note)
    return str(known.experiment_id)


def _make_artifacts_relative(experiment: str) -> None:
    """Make the folder of an experiment's artifacts relative, if the store is SQLite in this folder.

    Both then survive when the folder is moved; MLflow's own client only writes absolute paths.
    """
    file = Path(tracking_uri().removeprefix("sqlite:///"))
    if not tracking_uri().startswith("sqlite:///") or file.resolve().parent != Path.cwd():
        return
    with closing(sqlite3.connect(file)) as database, database:
        update = "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?"
        database.execute(update, (ARTIFACTS, int(experiment)))


def note(name: str, **facts: str) -> str:
    """An experiment's description: the file ``name``.md, with ``facts`` in its {placeholders}."""
    text = (NOTES / f"{name}.md").read_text()
    return text.format(**facts) if facts else text
