"""Watching a worker process: one that hangs or outlives its time is ended, with all it started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.2
LOG_BYTES = 400  # of a log, told where its process failed


def watch(
    process: subprocess.Popen[bytes],
    signs: Callable[[], object],
    stalled_s: Callable[[], float],
    until_s: float,
) -> str:
    """Wait for the end: "ended" by itself, or killed as "stalled" or "late".

    ``signs`` is called five times a second; while what it returns does not change for ``stalled_s``
    the process is taken to hang. ``until_s`` is when it must have ended, by time.monotonic().
    """
    seen, changed_s = signs(), time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            now_s, found = time.monotonic(), signs()
            if found != seen:
                seen, changed_s = found, now_s
            if now_s > until_s:
                return "late"
            if now_s - changed_s > stalled_s():
                return "stalled"
        signs()
        return "ended"
    finally:
        end_group(process)


def never() -> float:
    """For ``stalled_s``: however long it takes."""
    return math.inf


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all of its group, if there is one of its number."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def last_words(log: Path) -> str:
    """The end of a log as one line."""
    text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.is_file() else ""
    return " ".join(text.split())
