"""MLflow's server with a first page of ours: the best learner of every op family on every device.

MLflow finds it as app ``itercast`` (entry point group ``mlflow.app``) and serves it by ``mlflow
server --app-name itercast``; ``itercast ui`` runs that. MLflow's own pages are at ``/mlflow``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from itercast.eval.tracking import store
from itercast.eval.tracking.logs import ITERATIONS

if TYPE_CHECKING:
    from mlflow.entities import Run

HOST = "127.0.0.1"
TEMPLATE = Path(__file__).with_name("start_page.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The newest scores of one family: runs of the learners that share rank 1, then the others.

    ``prices``: the learner that forecasts use.
    """

    family: str
    first: Sequence[Run]
    others: Sequence[Run]
    prices: str

    @property
    def ids(self) -> list[str]:
        """Of all runs, the best first."""
        return [run.info.run_id for run in (*self.first, *self.others)]


def lines(runs: Sequence[Run]) -> list[Line]:
    """A line per family. Of learners of equal rank, the one that prices it comes first."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(run.data.tags["family"], []).append(run)
    return [_line(family, families[family]) for family in sorted(families)]


def _line(family: str, runs: Sequence[Run]) -> Line:
    def place(run: Run) -> tuple[float, bool, float]:
        metrics = run.data.metrics
        return metrics["rank"], "prices" not in run.data.tags, metrics["median_ape_pct"]

    order = sorted(runs, key=place)
    return Line(
        family=family,
        first=[run for run in order if run.data.metrics["rank"] == 1],
        others=[run for run in order if run.data.metrics["rank"] > 1],
        prices=next((r.data.tags["learner"] for r in order if "prices" in r.data.tags), ""),
    )


def page() -> str:
    """The first page: a table per device, and links to MLflow's pages."""
    from flask import render_template_string

    client = store.connect()
    found = client.search_experiments(order_by=["last_update_time DESC"])
    devices = [
        (one, lines(client.search_runs([one.experiment_id], store.NEWEST, max_results=5000)))
        for one in found
        if one.name.startswith("ops/")
    ]
    others = [one for one in found if not one.name.startswith("ops/")]
    latest = [one.tags.get(store.NOTE, "") for one in others if one.name == ITERATIONS]
    facts = {"devices": devices, "others": others, "latest": latest}
    return render_template_string(TEMPLATE.read_text(), **facts)


def create_app() -> object:
    """MLflow's server; ``/`` is the first page. Called by ``mlflow server``."""
    from flask import request
    from mlflow.server import app, serve
    from mlflow.server.fastapi_app import app as served

    app.add_url_rule("/mlflow", "itercast_mlflow", serve)

    @app.before_request
    def first_page() -> str | None:
        return page() if request.path == "/" else None

    return served


def run_server(port: int) -> int:
    """Serve the project's store until interrupted; returns the exit code of MLflow's server."""
    uri = store.tracking_uri()
    options = {
        "--app-name": "itercast",
        "--backend-store-uri": uri,
        "--host": HOST,
        "--port": str(port),
        "--workers": "1",
        "--uvicorn-opts": "--log-level warning",
    }
    words = [word for option in options.items() for word in option]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment = {**os.environ, **quiet, "MLFLOW_TRACKING_URI": uri}
    command = [sys.executable, "-m", "mlflow", "server", *words]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            with suppress(ProcessLookupError):  # its workers too
                os.killpg(server.pid, signal.SIGTERM)
