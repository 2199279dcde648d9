"""Servers and processes that tests start: a free port, whether they live and answer."""

import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 90  # given to a loaded machine; a free one answers within 15


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until(true: Callable[[], bool], found: Callable[[], object]) -> None:
    """Wait until something is true; fails with what was found instead."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, found()
        time.sleep(0.3)


def page_at(url: str) -> bytes:
    """What a server answers; empty where it does not."""
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            return bytes(page.read())
    except OSError:
        return b""


def answering(url: str) -> None:
    """Wait until a server answers."""
    until(lambda: page_at(url) != b"", lambda: f"{url} does not answer")


def lives(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
