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
from itercast.learners.models.compared import BLEND
from itercast.learners.models.noise import FEWEST

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run

HOST = "127.0.0.1"
TEMPLATE = Path(__file__).with_name("start_page.html")
PRICING = "tags.prices = 'yes'"  # runs of learners that price, or priced, a family
OURS = f"{store.NEWEST} and tags.learner = '{BLEND}'"  # comparisons of what ships
BAD_PCT = 50.0  # intervals of 80 % that cover less are shown in red
EXPERIMENTS = sorted(path.stem for path in store.NOTES.glob("*.md"))  # and those of ops
MOST = 5000  # runs of an experiment that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The newest scores of one family: runs of the learners that share rank 1, then the others.

    ``prices``: the run of the learner that forecasts use, if any. ``history``: its median errors in
    % over all trainings, the newest last.
    """

    family: str
    first: Sequence[Run]
    others: Sequence[Run]
    prices: Run | None
    history: Sequence[float] = ()

    @property
    def few(self) -> bool:
        """Whether no difference of learners counts, for want of held-out shapes."""
        return 0 < self.first[0].data.metrics.get("shapes", 0) < FEWEST

    @property
    def ids(self) -> list[str]:
        """Of all runs, the best first."""
        return [run.info.run_id for run in (*self.first, *self.others)]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The history as points of a line in an SVG of 100 x 24, whose lower edge is 0 %."""
        top, steps = max(self.history, default=0.0) or 1.0, max(1, len(self.history) - 1)
        return [(2 + 96 * i / steps, 22 - 20 * pct / top) for i, pct in enumerate(self.history)]


def lines(runs: Sequence[Run], before: Sequence[Run] = ()) -> list[Line]:
    """A line per family of the newest runs. Of learners of equal rank, the pricing one comes first.

    ``before``: all runs that price a family, the oldest first.
    """
    families: dict[str, list[Run]] = {}
    for run in runs:
        families.setdefault(run.data.tags["family"], []).append(run)
    history: dict[str, list[float]] = {}
    for run in before:
        family, metrics = run.data.tags["family"], run.data.metrics
        history.setdefault(family, []).append(metrics["median_ape_pct"])
    return [_line(name, families[name], history.get(name, [])) for name in sorted(families)]


def _line(family: str, runs: Sequence[Run], history: Sequence[float]) -> Line:
    def place(run: Run) -> tuple[float, bool, float]:
        metrics = run.data.metrics
        return metrics["rank"], "prices" not in run.data.tags, metrics["median_ape_pct"]

    order = sorted(runs, key=place)
    return Line(
        family=family,
        first=[run for run in order if run.data.metrics["rank"] == 1],
        others=[run for run in order if run.data.metrics["rank"] > 1],
        prices=next((run for run in order if "prices" in run.data.tags), None),
        history=history,
    )


def page() -> str:
    """The first page: accuracy of iterations, a table of op families per device, links."""
    from flask import render_template_string

    client = store.connect()
    found = client.search_experiments(order_by=["last_update_time DESC"])

    def runs(one: Experiment, where: str, order: str) -> Sequence[Run]:
        place = [one.experiment_id]
        return list(client.search_runs(place, where, max_results=MOST, order_by=[order]))

    by_time, by_kind = "attributes.start_time ASC", "tags.kind ASC"
    devices = [
        (one, lines(runs(one, store.NEWEST, by_time), runs(one, PRICING, by_time)))
        for one in found
        if one.name.startswith("ops/")
    ]
    kinds = [(one, runs(one, OURS, by_kind)) for one in found if one.name == ITERATIONS]
    others = [one for one in found if one.name in EXPERIMENTS]
    facts = {"devices": devices, "others": others, "kinds": kinds, "view": store.TRAINING_VIEW}
    return render_template_string(TEMPLATE.read_text(), **facts, bad_pct=BAD_PCT, fewest=FEWEST)


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
