"""A GPU worker of a sweep that measures points in chunks and survives crashes.

The points of the current chunk are in a file, with a note of the one under way. When a worker dies
the next one reads the file, writes an error row for that point and measures the others. Where the
point is not known the chunk is measured in halves.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.microbench import store
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import Row
from itercast.microbench.sweep.gpu_chunks import CHUNK_POINTS, PROFILING, Bench, Broken, Chunk
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.sweep.scheduler import Chosen, Sweep
from itercast.microbench.timing.clock import CallCost
from itercast.microbench.timing.cuda_device import CudaDevice
from itercast.microbench.timing.kernels import timing_disagreement

log = logging.getLogger(__name__)
EXIT_BROKEN = 75  # sysexits.h: temporary failure; the parent starts another worker
CHUNK_S = 20.0  # of a chunk; after it no further point is begun
PROFILE_EVERY = 4  # chunks; a profiler session takes a second and slows launches
ANCHOR = Gemm(m=2048, n=2048, k=2048, dtype="bf16")
NOTE_BYTES = 8  # at the head of the file; blank where no point is under way


class Pending:
    """A file that says which points are under way, so that work goes on after a worker has died.

    It holds the points of the current chunk, the number of the one being measured, and the groups
    of points to measure after it. It is written at the start of every point, from which the parent
    sees that the worker lives.
    """

    def __init__(self, order: WorkerOrder) -> None:
        lane = f"-{order.lane}" if order.lanes > 1 else ""
        self.path = Path(order.root) / ".journal" / f"pending-{order.gpu}{lane}.json"
        self.run_id = order.run_id
        self._file: int | None = None

    def write(self, now: Sequence[Chosen], after: Sequence[Sequence[Chosen]]) -> None:
        """Write the points of a chunk and the groups after it, before the chunk is begun."""
        plain = {"run": self.run_id, "now": _plain(now), "after": [_plain(g) for g in after]}
        self.close()
        write_atomic(self.path, b" " * NOTE_BYTES + json.dumps(plain).encode())
        self._file = os.open(self.path, os.O_WRONLY)

    def note(self, number: int | None) -> None:
        """Write the number of the point under way; survives the death of this process."""
        if self._file is not None:
            text = "" if number is None else str(number)
            os.pwrite(self._file, text.ljust(NOTE_BYTES).encode(), 0)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> Unfinished:
        """The points that an earlier worker had not finished."""
        if not self.path.is_file():
            return Unfinished()
        text = self.path.read_text()
        found, noted = json.loads(text[NOTE_BYTES:]), text[:NOTE_BYTES].strip()
        return Unfinished(
            now=_chosen(found["now"]),
            after=[_chosen(group) for group in found["after"]],
            noted=int(noted) if noted else None,
            same_run=found["run"] == self.run_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What an earlier worker left: its chunk, the number of the point noted, groups after it.

    ``same_run``: the same parent started it, and goes on after its death.
    """

    now: list[Chosen] = field(default_factory=list)
    after: list[list[Chosen]] = field(default_factory=list)
    noted: int | None = None
    same_run: bool = False

    def culprit(self) -> Chosen | None:
        """The point that the earlier worker died on, where that is certain.

        Of the same run: the point noted, or the only one. A worker of another run may have been
        killed together with its parent: its point is tried again alone, and only then certain.
        """
        if self.noted == PROFILING or not self.now:
            return None
        alone = self.now[0] if len(self.now) == 1 else None
        return (self.suspect or alone) if self.same_run else (self.suspect and alone)

    @property
    def suspect(self) -> Chosen | None:
        """The point that was under way, if one was noted."""
        return None if self.noted is None or self.noted == PROFILING else self.now[self.noted]

    def groups(self) -> list[list[Chosen]]:
        """Groups to measure: the suspect alone and the others, or halves of the chunk."""
        whole = self.suspect is None and (self.noted == PROFILING or not self.same_run)
        return [*([self.now] if whole else _split(self.now, self.suspect)), *self.after]


def _plain(chosen: Sequence[Chosen]) -> list[Row]:
    return [{"family": f.name, "point": asdict(p), "repeat": n} for f, p, n in chosen]


def _chosen(plain: Sequence[Row]) -> list[Chosen]:
    known = families()
    return [
        (known[c["family"]], known[c["family"]].params(**c["point"]), c["repeat"]) for c in plain
    ]


def _split(chosen: Sequence[Chosen], suspect: Chosen | None) -> list[list[Chosen]]:
    """Split a chunk that broke: the suspect alone and the others; halves without a suspect."""
    if suspect is not None:
        return [[suspect], [c for c in chosen if c is not suspect]]
    half = (len(chosen) + 1) // 2
    return [list(chosen[:half]), list(chosen[half:])]


class ChunkWorker:
    """Measures chunks until the budget is spent; SystemExit after a sticky error (``Broken``).

    ``checked``: kernels that both events and the profiler timed; ``disagreeing`` of them do.
    """

    def __init__(self, sweep: Sweep, device: CudaDevice, journal: store.Journal) -> None:
        order = sweep.order
        self.sweep, self.device, self.journal = sweep, device, journal
        self.begin_s = order.begin_s or time.monotonic()
        self.pending = Pending(order)
        # a profiler would slow later host times
        self.profiles = not all(families()[n].on_host for n in order.families)
        self.groups = self._unfinished_groups()
        self.bench = Bench(
            device=device,
            anchor=families()["gemm"].build(ANCHOR, device.name).run,
            call_cost=CallCost(device.wait),
            note=self.pending.note,
        )
        self.chunks = self.checked = self.disagreeing = 0

    def run(self) -> None:
        """Measure chunk after chunk."""
        budget_s = self.sweep.order.budget_s
        while (now_s := time.monotonic() - self.begin_s) < budget_s:
            chosen = self.groups.popleft() if self.groups else choose_chunk(self.sweep, now_s)
            if not chosen:
                break
            self._measure(chosen, time.monotonic() + min(CHUNK_S, budget_s - now_s))
            gc.collect()
        log.info(
            "%d chunks; of %d kernels timed by events and profiler %d disagree",
            self.chunks,
            self.checked,
            self.disagreeing,
        )

    def _measure(self, chosen: list[Chosen], until_s: float) -> None:
        """Measure one chunk, journal its rows and keep what it did not finish."""
        self.pending.write(chosen, self.groups)
        chunk = Chunk(self.bench, chosen, until_s)
        alone = len(chosen) == 1  # a profiler session would cost more than the point
        profiled = self.profiles and not alone and self.chunks % PROFILE_EVERY == 0
        try:
            rows = chunk.measure(self.sweep, profiled)
        except Broken as exc:
            self._give_up(chosen, exc)
        self.journal.append(rows)
        self.groups.extendleft([chunk.rest] if chunk.rest else [])
        self.groups.extend([point] for point in chunk.later)
        self.pending.write([], self.groups)
        self.sweep.settle(rows)
        self.chunks += not alone
        self._log_chunk(rows, time.monotonic() - chunk.begin_s)
        if chunk.lost:
            raise SystemExit(EXIT_BROKEN)

    def _give_up(self, chosen: list[Chosen], broken: Broken) -> NoReturn:
        """Write an error row for the culprit and leave the other points to the next worker."""
        culprit = broken.culprit or (chosen[0] if len(chosen) == 1 else None)
        if culprit is not None:
            self.journal.append([failed_row(self.sweep, culprit, str(broken))])
        groups = [g for g in _split(chosen, culprit) if g and g != [culprit]]
        self.pending.write([], [*groups, *self.groups])
        raise SystemExit(EXIT_BROKEN) from broken

    def _log_chunk(self, rows: list[Row], wall_s: float) -> None:
        """Log one line on a chunk: rows, seconds, whether events and profiler agree."""
        checked, disagreeing = timing_disagreement(pd.DataFrame(rows))
        self.checked, self.disagreeing = self.checked + checked, self.disagreeing + disagreeing
        launch_us = rows[0].get("tiny_launch_us", math.nan) if rows else math.nan
        log.info(
            "%d rows in %.1f s; of %d kernels timed by events and profiler %d disagree; "
            "a launch takes %.1f us",
            len(rows),
            wall_s,
            checked,
            disagreeing,
            launch_us,
        )

    def _unfinished_groups(self) -> deque[list[Chosen]]:
        """Unfinished groups of an earlier worker, without the point it died on, which gets a row.

        Points of families that this worker does not measure are dropped; a later sweep has them.
        """
        sweep, unfinished = self.sweep, self.pending.read()
        culprit = unfinished.culprit()
        if unfinished.same_run and unfinished.noted == PROFILING:
            self.profiles = False
        if culprit is not None and not self._is_done(culprit):
            self.journal.append([failed_row(sweep, culprit, "its worker process died")])
            sweep.done.add(sweep.row_keys(*culprit)["warm"])
        groups = [
            [c for c in group if c[0].name in sweep.order.families and not self._is_done(c)]
            for group in unfinished.groups()
        ]
        sweep.done |= {sweep.row_keys(*c)["warm"] for group in groups for c in group}
        groups = [group for group in groups if group]
        self.pending.write([], groups)
        return deque(groups)

    def _is_done(self, chosen: Chosen) -> bool:
        return self.sweep.row_keys(*chosen)["warm"] in self.sweep.done


def sweep_in_chunks(sweep: Sweep, device: CudaDevice, journal: store.Journal) -> None:
    """Measure in chunks until the budget is spent; SystemExit after a sticky error (``Broken``).

    Python's garbage collector runs between chunks only, so that it delays no launch.
    """
    worker = ChunkWorker(sweep, device, journal)
    gc.collect()
    gc.disable()
    try:
        worker.run()
    finally:
        gc.enable()
        worker.pending.close()


def choose_chunk(sweep: Sweep, now_s: float) -> list[Chosen]:
    """Choose a chunk that fits the time left, by what points of each family usually cost."""
    chosen: list[Chosen] = []
    left_s = min(sweep.order.budget_s - now_s, CHUNK_S)
    while len(chosen) < CHUNK_POINTS and (left_s > 0 or not chosen):
        found = sweep.choose(now_s)
        if found is None:
            break
        chosen.append(found)
        left_s -= sweep.charge(found[0])
    return chosen


def failed_row(sweep: Sweep, chosen: Chosen, reason: str) -> Row:
    """The row of a point that ended its worker."""
    return sweep.row(chosen, "warm", {"status": "error", "reason": reason, "cost_s": 0.0})
