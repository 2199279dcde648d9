"""Serves a page with sliders on this machine that forecasts as they move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import typer

from itercast.names import listing

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("explore.html")
KINDS = ("cases", "gpus")
LARGEST = 1 << 20  # of numbers that a page may ask for
SHOWN = (
    *("plan", "iteration_us", "iteration_us_p10", "iteration_us_p90", "compute_us"),
    *("exposed_comm_us", "idle_by_us", "memory_by_bytes", "memory_bytes", "memory_room_bytes"),
    *("fits", "samples_per_s", "tokens_per_s", "mfu_frac", "unmodelled_frac", "network", "notes"),
)
ONE_AT_A_TIME = Lock()


def serve(port: int) -> None:
    """Serve the page at this port until Ctrl-C."""
    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as exc:
        raise ValueError(f"port {port}: {exc.strerror}") from exc
    typer.echo(f"http://{HOST}:{port}  (Ctrl-C ends it)")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


@lru_cache(maxsize=4096)
def answer(case: str, gpu: str, batch: int, plan: str, dtype: str) -> Mapping[str, Any]:
    """What the page shows of a forecast; ValueError where it cannot be asked."""
    for kind, name in zip(KINDS, (case, gpu), strict=True):
        if name not in names(kind):
            raise ValueError(f"{name!r} is none of `itercast list {kind}`")
    if "/" in plan or ".yaml" in plan or ".json" in plan:
        raise ValueError(f"plan {plan!r}: this page takes no files")
    from itercast.compose.predict import predict

    with ONE_AT_A_TIME:
        found = predict(case, gpu=gpu, plan=plan, batch=batch, dtype=dtype)
    return {name: getattr(found, name) for name in SHOWN}


@lru_cache(maxsize=2)
def names(kind: str) -> tuple[str, ...]:
    """The names of cases or GPUs."""
    return tuple(listing(kind))


class Handler(BaseHTTPRequestHandler):
    """Answers the page, its lists of names, and forecasts as JSON."""

    def do_GET(self) -> None:
        """Serve one address; others are not found, other hosts' pages are refused."""
        asked = urlsplit(self.path)
        if (self.headers.get("Host") or "").partition(":")[0] not in (HOST, "localhost"):
            self._send(403, "text/plain", b"only for this machine")
        elif asked.path == "/":
            self._send(200, "text/html; charset=utf-8", PAGE.read_bytes())
        elif asked.path == "/names":
            self._json(200, {kind: names(kind) for kind in KINDS})
        elif asked.path == "/forecast":
            self._forecast(dict(parse_qsl(asked.query)))
        else:
            self._send(404, "text/plain", b"not found")

    def _forecast(self, asked: Mapping[str, str]) -> None:
        try:
            batch = int(asked.get("batch", ""))
            if not 1 <= batch <= LARGEST:
                raise ValueError(f"batch {batch}: allowed are 1 to {LARGEST}")
            text = [asked.get(name, "") for name in ("case", "gpu", "plan", "dtype")]
            case, gpu, plan, dtype = text
            self._json(200, answer(case, gpu, batch, plan, dtype or "bf16"))
        except (ValueError, RuntimeError) as exc:
            self._json(400, {"error": str(exc)})

    def _json(self, status: int, value: object) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        with suppress(ConnectionError):  # the page has asked anew, or is closed
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""
