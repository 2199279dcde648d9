"""The run of a training that MLflow shows meanwhile; it ends as FINISHED, FAILED or KILLED."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec
from urllib.parse import urlsplit

from itercast.eval.tracking import store
from itercast.eval.tracking.store import tracking_uri
from itercast.microbench.sweep.cards import commit

if TYPE_CHECKING:
    from mlflow import MlflowClient


EXPERIMENT, SOURCE = "trainings", "itercast train"
HOST, PROCESS = "host", "process"  # tags of where an open run's command works
P = ParamSpec("P")
log = logging.getLogger(__name__)
REACHED_S = 3.0  # that a server may take to accept a connection
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
warned: set[str] = set()  # stores of which this process has said so
SHORT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


@dataclass(slots=True)
class OpenRun:
    """A run in progress; ``run_id`` is empty where it could not be logged, then nothing more is."""

    run_id: str = ""

    def progress(self, name: str, value: int) -> None:
        """Tell a number that grows while the command works: a tag, as metrics are compared."""
        if self.run_id and not attempt(self._tag, name, value):
            self.run_id = ""

    def _tag(self, name: str, value: int) -> None:
        store.connect().set_tag(self.run_id, name, value)

    def _begin(self, name: str, params: Mapping[str, object]) -> None:
        client = store.connect()
        place = store.experiment(client, EXPERIMENT, store.note(EXPERIMENT))
        end_left(client, place)
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


def end_left(client: MlflowClient, experiment: str) -> None:
    """End, as KILLED, runs whose command on this machine is gone and could not end them."""
    asked = f"attributes.status = 'RUNNING' and tags.{HOST} = '{socket.gethostname()}'"
    for run in client.search_runs([experiment], asked):
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


def attempt(write: Callable[P, object], *args: P.args, **options: P.kwargs) -> bool:
    """Whether ``write`` logged its arguments to MLflow; one warning a store says why not."""
    for name, value in SHORT.items():
        os.environ.setdefault(name, value)
    try:
        reach(tracking_uri())
        write(*args, **options)
    except Exception as exc:  # whatever MLflow, its database or the network raises
        told = " ".join(str(exc).split())[:160] or type(exc).__name__
        if (uri := tracking_uri()) not in warned:
            log.warning("not logged to MLflow at %s: %s", uri, told)
            warned.add(uri)
        return False
    return True


def reach(uri: str) -> None:
    """OSError where the machine of a tracking URI accepts no connection; files are not tried."""
    place = urlsplit(uri)
    port = place.port or PORTS.get(place.scheme.partition("+")[0])
    if place.hostname and port:
        with socket.create_connection((place.hostname, port), timeout=REACHED_S):
            pass
