"""A sweep in chunks that survives what its points do to the device.

The points in flight stand in a file, with a note of the one under way. A worker that dies leaves it
to the next one, which marks that point and measures the others. Where nobody knows which point it
was, the chunk is measured in halves.
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
from typing import Any, NoReturn

import pandas as pd

from microbench import store
from microbench.ops import families
from microbench.ops.matrix.gemm import Gemm
from microbench.sweep.gpu_chunks import CHUNK_POINTS, PROFILING, Bench, Broken, Chunk
from microbench.sweep.scheduler import Chosen, Sweep
from microbench.sweep.sustained import measure_sustained
from microbench.timing.clock import CallCost
from microbench.timing.device import Device
from microbench.timing.kernels import timing_disagreement

log = logging.getLogger(__name__)
EXIT_BROKEN = 75  # sysexits.h: temporary failure; the parent starts another worker
CHUNK_S = 20.0  # after which a chunk begins no further point
PROFILE_EVERY = 4  # chunks: a session takes a second, and launches are slower under one
ANCHOR = Gemm(m=2048, n=2048, k=2048, dtype="bf16")
NOTE_BYTES = 8  # at the head of the file, blanks where no point is under way


class Pending:
    """The points in flight and the groups of points after them, on disk.

    Its file changes whenever a point is begun, which is how a parent sees that a worker lives.
    """

    def __init__(self, root: Path, gpu: str, run_id: str = "") -> None:
        self.path = root / ".journal" / f"pending-{gpu}.json"
        self.run_id = run_id
        self._file: int | None = None

    def write(self, now: Sequence[Chosen], after: Sequence[Sequence[Chosen]]) -> None:
        """Before anything is done with the points ``now``."""
        plain = {"run": self.run_id, "now": _plain(now), "after": [_plain(g) for g in after]}
        self.close()
        store.write_atomic(self.path, b" " * NOTE_BYTES + json.dumps(plain).encode())
        self._file = os.open(self.path, os.O_WRONLY)

    def note(self, number: int | None) -> None:
        """The point of ``now`` that is under way: kept if this process dies, lost with power."""
        if self._file is not None:
            text = "" if number is None else str(number)
            os.pwrite(self._file, text.ljust(NOTE_BYTES).encode(), 0)

    def close(self) -> None:
        """No more notes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> Left:
        """What an earlier worker left."""
        if not self.path.is_file():
            return Left()
        text = self.path.read_text()
        found, noted = json.loads(text[NOTE_BYTES:]), text[:NOTE_BYTES].strip()
        return Left(
            now=_chosen(found["now"]),
            after=[_chosen(group) for group in found["after"]],
            noted=int(noted) if noted else None,
            same_run=found["run"] == self.run_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Points an earlier worker was at, the one it had noted, and groups that came after.

    ``same_run``: it was started by the same parent, which went on when it had died.
    """

    now: list[Chosen] = field(default_factory=list)
    after: list[list[Chosen]] = field(default_factory=list)
    noted: int | None = None
    same_run: bool = False

    def culprit(self) -> Chosen | None:
        """The point that worker died on.

        One that was alone, or that was noted: but a worker of another run may have been ended
        together with its parent, so that a point is tried again, alone.
        """
        if self.noted == PROFILING or not self.now:
            return None
        alone = self.now[0] if len(self.now) == 1 else None
        return (self.suspect or alone) if self.same_run else (self.suspect and alone)

    @property
    def suspect(self) -> Chosen | None:
        """The point that was under way."""
        return None if self.noted is None or self.noted == PROFILING else self.now[self.noted]

    def groups(self) -> list[list[Chosen]]:
        """What to measure: a suspect alone and the others, or halves where the worker just died."""
        whole = self.suspect is None and (self.noted == PROFILING or not self.same_run)
        return [*([self.now] if whole else _apart(self.now, self.suspect)), *self.after]


def _plain(chosen: Sequence[Chosen]) -> list[dict[str, Any]]:
    return [{"family": f.name, "point": asdict(p), "repeat": n} for f, p, n in chosen]


def _chosen(plain: Sequence[dict[str, Any]]) -> list[Chosen]:
    known = families()
    return [
        (known[c["family"]], known[c["family"]].params(**c["point"]), c["repeat"]) for c in plain
    ]


def _apart(chosen: Sequence[Chosen], suspect: Chosen | None) -> list[list[Chosen]]:
    """Groups to measure instead of one that broke: the suspect alone and the others, or halves."""
    if suspect is not None:
        return [[suspect], [c for c in chosen if c is not suspect]]
    half = (len(chosen) + 1) // 2
    return [list(chosen[:half]), list(chosen[half:])]


class ChunkWorker:
    """Measures groups of points until the budget is spent; SystemExit where the device broke."""

    def __init__(self, sweep: Sweep, device: Device, journal: store.Journal) -> None:
        order = sweep.order
        self.sweep, self.device, self.journal = sweep, device, journal
        self.begin_s = order.begin_s or time.monotonic()
        self.pending = Pending(Path(order.root), order.gpu, order.run_id)
        self.profiles = order.families != ("host",)  # host times: in a process that never profiled
        self.groups = self._left_over()
        self.bench = Bench(
            device=device,
            anchor=families()["gemm"].build(ANCHOR, device.name).run,
            call_cost=CallCost(device.wait),
            note=self.pending.note,
        )
        self.chunks = self.checked = self.disagreeing = 0

    def run(self) -> None:
        """Sustained products first, as they take little; then chunk by chunk."""
        budget_s = self.sweep.order.budget_s
        try:
            measure_sustained(self.sweep, self.device, self.journal)
        except Broken as exc:
            raise SystemExit(EXIT_BROKEN) from exc
        while (now_s := time.monotonic() - self.begin_s) < budget_s:
            left = self.groups.popleft() if self.groups else choose_chunk(self.sweep, now_s)
            if not left:
                break
            self._measure(left, time.monotonic() + min(CHUNK_S, budget_s - now_s))
            gc.collect()
        shares = (self.disagreeing, self.checked)
        log.info("%d chunks; %d of %d kernels disagree with events", self.chunks, *shares)

    def _measure(self, chosen: list[Chosen], until_s: float) -> None:
        """One chunk, its rows and what it leaves."""
        self.pending.write(chosen, self.groups)
        chunk = Chunk(self.bench, chosen, until_s)
        alone = len(chosen) == 1  # a session costs more than all the rest of such a chunk
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
        self._tell(rows, time.monotonic() - chunk.begin_s)
        if chunk.lost:
            raise SystemExit(EXIT_BROKEN)

    def _give_up(self, chosen: list[Chosen], broken: Broken) -> NoReturn:
        """Mark the culprit and leave the others to the next worker."""
        culprit = broken.culprit or (chosen[0] if len(chosen) == 1 else None)
        if culprit is not None:
            self.journal.append([failed_row(self.sweep, culprit, str(broken))])
        groups = [g for g in _apart(chosen, culprit) if g and g != [culprit]]
        self.pending.write([], [*groups, *self.groups])
        raise SystemExit(EXIT_BROKEN) from broken

    def _tell(self, rows: list[dict[str, Any]], wall_s: float) -> None:
        """One line on a chunk: whether profiler and events agree on kernels' times."""
        checked, disagreeing = timing_disagreement(pd.DataFrame(rows))
        self.checked, self.disagreeing = self.checked + checked, self.disagreeing + disagreeing
        launch_us = rows[0].get("tiny_launch_us", math.nan) if rows else math.nan
        said = (len(rows), wall_s, disagreeing, checked, launch_us)
        log.info("%d rows in %.1f s; %d of %d kernels disagree; a launch %.1f us", *said)

    def _left_over(self) -> deque[list[Chosen]]:
        """Groups of an earlier worker, less the point it died on; that one becomes a row.

        Points of families this worker does not measure are dropped: the next sweep names them anew.
        """
        sweep, left = self.sweep, self.pending.read()
        culprit = left.culprit()
        if left.same_run and left.noted == PROFILING:
            self.profiles = False
        if culprit is not None and not self._known(culprit):
            self.journal.append([failed_row(sweep, culprit, "the worker died on it")])
            sweep.done.add(sweep.row_keys(*culprit)["warm"])
        groups = [
            [c for c in group if c[0].name in sweep.order.families and not self._known(c)]
            for group in left.groups()
        ]
        sweep.done |= {sweep.row_keys(*c)["warm"] for group in groups for c in group}
        groups = [group for group in groups if group]
        self.pending.write([], groups)
        return deque(groups)

    def _known(self, chosen: Chosen) -> bool:
        return self.sweep.row_keys(*chosen)["warm"] in self.sweep.done


def sweep_in_chunks(sweep: Sweep, device: Device, journal: store.Journal) -> None:
    """Measure until the budget is spent; SystemExit where the device broke.

    Python's garbage collection runs between chunks only, never in the middle of a launch.
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
    """Points that fit what is left of the budget, each charged what its family's usually cost."""
    chosen: list[Chosen] = []
    left_s = min(sweep.order.budget_s - now_s, CHUNK_S)
    while len(chosen) < CHUNK_POINTS and (left_s > 0 or not chosen):
        found = sweep.choose(now_s)
        if found is None:
            break
        chosen.append(found)
        left_s -= sweep.charge(found[0])
    return chosen


def failed_row(sweep: Sweep, chosen: Chosen, reason: str) -> dict[str, Any]:
    """The row of a point that took the worker with it."""
    facts = {"cache": "warm", "key": sweep.row_keys(*chosen)["warm"], "cost_s": 0.0}
    return {**sweep.row_facts(*chosen), **facts, "status": "error", "reason": reason}
