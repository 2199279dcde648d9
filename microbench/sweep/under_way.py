"""Which point a sweep's worker is at, in a file that outlives a worker which dies of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from itercast.microbench.store import Journal, Row
from itercast.microbench.sweep.rows import Order
from itercast.microbench.sweep.scheduler import Chosen, Sweep

POINT, CHUNK, PROFILER = "point", "chunk", "profiler"  # what is under way


def under_way_path(order: Order) -> Path:
    """Path of the file; each write tells the parent that the worker lives."""
    lane = f"-{order.lane}" if order.lanes > 1 else ""
    return Path(order.root) / ".journal" / f"pending-{order.gpu}{lane}.json"


class UnderWay:
    """Notes what is under way, and reads what the worker before this one left.

    - ``culprit``: the error row of the point that the earlier worker died of, None if unknown. It
      is certain if the same run goes on; a worker of another run may have been killed together
      with its parent: its point is suspect, and the culprit if the next worker dies at it, too.
    - ``died_at``: what was under way where a worker of this run died, "" for nothing.

    Ranks that measure together note nothing.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.path = sweep, under_way_path(sweep.order)
        self._alone: Row | None = None
        self._row: Row | None = None
        earlier = json.loads(self.path.read_text() or "{}") if self.path.is_file() else {}
        same_run, row = earlier.get("run") == sweep.order.run_id, earlier.get("row") or {}
        key, suspect = row.get("key", ""), earlier.get("suspect", "")
        certain = bool(row) and (same_run or key == suspect)
        self.died_at: str = earlier.get("at", "") if same_run else ""
        self.culprit: Row | None = row if certain and key not in sweep.done else None
        self._suspect = key if row and not certain else suspect
        self._file: int | None = None
        if not sweep.order.together:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT)

    def begin(self, chosen: Sequence[Chosen]) -> None:
        """Note that the points of a chunk are measured; one that is alone is to blame for all."""
        self._alone = self._died_of(chosen[0]) if len(chosen) == 1 else None
        self.note(None)

    def note(self, chosen: Chosen | None) -> None:
        """Note the point under way, or that none is to blame alone."""
        row = self._died_of(chosen) if chosen else self._alone
        self._write(POINT if row else CHUNK, row)

    def profiling(self) -> None:
        """Note that points are profiled."""
        self._write(PROFILER)

    def end(self) -> None:
        """Note that nothing is under way."""
        self._write("")

    def blame(self, journal: Journal | None, reason: str) -> None:
        """Give the point under way an error row, where it is to blame alone."""
        if journal is not None and self._row is not None:
            journal.append([{**self._row, "reason": reason}])

    def _write(self, at: str, row: Row | None = None) -> None:
        """Replace the note in the file, which other processes read if this one dies."""
        self._row = row
        if self._file is not None:
            plain = {"run": self.sweep.order.run_id, "suspect": self._suspect, "at": at, "row": row}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(plain).encode(), 0)

    def _died_of(self, chosen: Chosen) -> Row:
        """The error row of a point that ended its worker."""
        failed = {"status": "error", "reason": "its worker process died", "cost_s": 0.0}
        return self.sweep.row(chosen, "warm", failed)
