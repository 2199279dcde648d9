"""Logging that no answer waits for: it is tried once and shortly, and a failure is one warning."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import ParamSpec
from urllib.parse import urlsplit

from itercast.eval.tracking.store import tracking_uri

P = ParamSpec("P")
log = logging.getLogger(__name__)
REACHED_S = 3.0  # that a server may take to accept a connection
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
warned: set[str] = set()  # stores of which this process has said so
SHORT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


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
