"""The run that MLflow shows while a training works; it ends as FINISHED, FAILED or KILLED."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec
from urllib.parse import urlsplit

from itercast.capture.base.garbage import without_garbage_collection
from itercast.eval.tracking import store
from itercast.eval.tracking.store import tracking_uri
from itercast.microbench.sweep.cards import commit

if TYPE_CHECKING:
    from mlflow import MlflowClient


EXPERIMENT, SOURCE = "trainings", "itercast train"
HOST, PROCESS = "host", "process"  # tags of where an open run's command works
P = ParamSpec("P")
log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 3.0
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
warned: set[str] = set()  # stores that this process has warned of
FAIL_SOON = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


@dataclass(slots=True)
class OpenRun:
    """A run in progress; ``run_id`` is empty once logging failed, and nothing more is logged."""

    run_id: str = ""

    def progress(self, name: str, value: int) -> None:
        """Log a number that grows while the command works: as a tag, since metrics are compared."""
        if self.run_id and not attempt(self._tag, name, value):
            self.run_id = ""

    def _tag(self, name: str, value: int) -> None:
        store.connect().set_tag(self.run_id, name, value)

    def _begin(self, name: str, params: Mapping[str, object]) -> None:
        client = store.connect()
        place = store.experiment(client, EXPERIMENT, store.note(EXPERIMENT))
        end_abandoned(client, place)
        tags = {"mlflow.source.name": SOURCE, "mlflow.source.git.commit": commit()}
        tags |= {HOST: socket.gethostname(), PROCESS: str(os.getpid())}
        self.run_id = client.create_run(place, tags=tags, run_name=name).info.run_id
        for key, value in params.items():
            client.log_param(self.run_id, key, value)

    def _end(self, state: str) -> None:
        store.connect().set_terminated(self.run_id, state)


@contextmanager
def open_run(name: str, params: Mapping[str, object]) -> Iterator[OpenRun]:
    """A run while the context lasts: FAILED where it raises, KILLED where it is interrupted."""
    run, state = OpenRun(), "FAILED"
    attempt(run._begin, name, params)
    try:
        yield run
        state = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        state = "KILLED"
        raise
    finally:
        if run.run_id:
            attempt(run._end, state)


def end_abandoned(client: MlflowClient, experiment: str) -> None:
    """End, as KILLED, runs whose command on this machine is gone and could not end them."""
    running_here = f"attributes.status = 'RUNNING' and tags.{HOST} = '{socket.gethostname()}'"
    for run in client.search_runs([experiment], running_here):
        if not _alive(int(run.data.tags[PROCESS])):
            client.set_terminated(run.info.run_id, "KILLED")


def _alive(process: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@without_garbage_collection()  # of MLflow's imports: a third of its time
def attempt(write: Callable[P, object], *args: P.args, **options: P.kwargs) -> bool:
    """Call ``write``, which logs to MLflow; returns whether it could. The first failure warns."""
    for name, value in FAIL_SOON.items():
        os.environ.setdefault(name, value)
    try:
        check_reachable(tracking_uri())
        write(*args, **options)
    except Exception as exc:  # whatever MLflow, its database or the network raises
        reason = " ".join(str(exc).split())[:160] or type(exc).__name__
        if (uri := tracking_uri()) not in warned:
            log.warning("not logged to MLflow at %s: %s", uri, reason)
            warned.add(uri)
        return False
    return True


def check_reachable(uri: str) -> None:
    """OSError where the server of a tracking URI accepts no connection; files are not tried."""
    server = urlsplit(uri)
    port = server.port or PORTS.get(server.scheme.partition("+")[0])
    if server.hostname and port:
        with socket.create_connection((server.hostname, port), timeout=CONNECT_TIMEOUT_S):
            pass
