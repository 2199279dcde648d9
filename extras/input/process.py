"""Starts a measurement in a process; ends it and its workers when it hangs or dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from itercast.capture.input.lane import InputLane, read_lane
from itercast.microbench.processes.child_processes import START, ended_with_this
from itercast.microbench.processes.watch import log_tail, watch

MODULE = "itercast.extras.input.measure"


def measured_lane(
    loader: str,
    seconds: float,
    limit_s: float,
    module: str = MODULE,
    words: tuple[str, str, str] = ("loader", "batch", "batches"),
) -> InputLane:
    """Measure the loader ``module:name`` for so many seconds in an own process.

    ValueError in one line where it is none, yields nothing, fails, dies, or yields no batch for
    ``limit_s`` seconds; all processes that it started are gone then. ``module`` measures it, a
    program as ``itercast.extras.input.measure``; ``words`` say what it is and yields.
    """
    order, (what, unit, units) = json.dumps({"loader": loader, "seconds": seconds}), words
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "lane.json", Path(folder) / "log"
        alive = Path(f"{result}.alive")
        command = [sys.executable, "-m", START, module, order]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, str(result)],
                env=os.environ | ended_with_this(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        ended = watch(
            process, lambda: _size(alive), lambda: limit_s, time.monotonic() + 10 * limit_s
        )
        count = _size(alive)
        if ended != "ended":
            hung = (
                f"yields no {unit} for {limit_s:.0f} s" if ended == "stalled" else "takes too long"
            )
            raise ValueError(f"{what} {loader!r} {hung}, after {count} {units}")
        if process.returncode:
            lines = log.read_text(errors="replace").splitlines()
            ours = [line for line in lines if "itercast: " in line]
            if process.returncode == 2 and ours:
                raise ValueError(ours[-1].partition("itercast: ")[2])
            code = f"its process ended with {process.returncode} after {count} {units}"
            raise ValueError(f"{what} {loader!r}: {code}: {log_tail(log)}".removesuffix(": "))
        return read_lane(result)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
