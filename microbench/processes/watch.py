"""Watches a worker process and kills it, with all it started, when it hangs or is late."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, a quota, a limit of file sizes
EXIT_BROKEN = 75  # of a worker that needs another one to go on; sysexits.h: temporary failure
POLL_S = 0.2
LOG_BYTES = 400  # at the end of a log, logged when its process failed


def watch(
    process: subprocess.Popen[bytes],
    progress: Callable[[], object],
    stalled_s: Callable[[], float],
    until_s: float,
) -> str:
    """Wait for a process; returns "ended", or "stalled" or "late" where it had to be killed.

    ``progress`` is called five times a second; the process stalls when the value does not change
    for ``stalled_s()`` seconds. It is late after ``until_s``, by time.monotonic().
    """
    latest, changed_s = progress(), time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            now_s, value = time.monotonic(), progress()
            if value != latest:
                latest, changed_s = value, now_s
            if now_s > until_s:
                return "late"
            if now_s - changed_s > stalled_s():
                return "stalled"
        progress()
        return "ended"
    finally:
        end_group(process)


@contextmanager
def ending_on_full_disks() -> Iterator[None]:
    """End a worker that cannot write its rows without a traceback: its parent says why."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        raise SystemExit(EXIT_BROKEN) from exc


def never() -> float:
    """Returns infinity: as ``stalled_s`` of ``watch``, the process never counts as stalled."""
    return math.inf


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group that this process leads, or the process where there is no group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def session_bytes(leader: int) -> int:
    """Memory of all processes of a session in bytes, shared pages once; 0 where no Linux is."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                shares = (folder / "smaps_rollup").read_text().split()
                total += 1024 * int(shares[shares.index("Pss:") + 1])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return total


def log_tail(log: Path) -> str:
    """The last 400 bytes of a log as one line."""
    text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.is_file() else ""
    return " ".join(text.split())
