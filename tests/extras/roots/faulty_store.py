"""A process between a client and an object store that spoils every request once.

    python faulty_store.py PORT ADDRESS-OF-STORE LOG

In turn: an answer 503, a connection cut in the middle (of a body that is sent, or of the answer),
an answer too late, a body that arrives torn though its length is right. The log gets a line each.
"""

import http.client
import itertools
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

LATE_S = 3.0  # more than the test's clients wait
LOCK = threading.Lock()


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests, those it has seen before unspoilt."""

    protocol_version = "HTTP/1.1"
    store, log = "", Path()
    seen: ClassVar[set[str]] = set()
    twice: ClassVar[set[str]] = set()
    faults = itertools.cycle(("refused", "cut", "late", "torn"))

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.fault()
        self.close_connection = True
        if fault == "refused":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()
            return
        if fault == "late":
            time.sleep(LATE_S)
        if fault == "torn":
            body = body[: len(body) // 2] + b"\0" * (len(body) - len(body) // 2)
        status, headers, answer = self.answer(body)
        if fault == "cut" and self.command == "PUT":
            return
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        length = dict(headers).get("Content-Length", str(len(answer)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(answer)))
        self.end_headers()
        with suppress(OSError):  # of a client that waits no more
            self.wfile.write(answer[: len(answer) // 2] if fault == "cut" else answer)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

    def fault(self) -> str:
        """What to do to this request; nothing to one that was seen, or cannot be hurt so."""
        what = f"{self.command} {self.path}"
        with LOCK:
            if what in self.twice:
                self.twice.remove(what)
                return "cut"
            if what in self.seen or self.command == "HEAD":
                return ""
            self.seen.add(what)
            fault = next(self.faults)
            while fault == "torn" and self.command != "PUT":
                fault = next(self.faults)
            if fault == "cut" and self.command == "PUT":  # aiohttp repeats it once in silence
                self.twice.add(what)
            if fault == "torn":  # it is what the client finds
                self.seen.add(f"GET {self.path}")
            with self.log.open("a") as log:
                log.write(f"{fault} {what}\n")
        return fault

    def answer(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The store's answer."""
        client = http.client.HTTPConnection(urlsplit(self.store).netloc)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        client.request(self.command, self.path, body, headers)
        found = client.getresponse()
        return found.status, found.getheaders(), found.read()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


if __name__ == "__main__":
    Proxy.store, Proxy.log = sys.argv[2], Path(sys.argv[3])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Proxy).serve_forever()
