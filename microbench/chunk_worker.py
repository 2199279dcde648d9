"""A sweep in chunks that survives what its points do to the device.

The points in flight stand in a file. A worker that dies leaves it to the next one, which measures
them one by one, so that only the culprit is marked.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microbench import store
from microbench.chunks import CHUNK_POINTS, Broken, Chunk, Device
from microbench.ops import families
from microbench.ops.gemm import Gemm
from microbench.sweep import Chosen, Sweep

EXIT_BROKEN = 75  # sysexits.h: temporary failure; the parent starts another worker
CHUNK_S = 20.0  # a chunk takes at most, as far as is known before
MAX_DEATHS = 2  # of a worker alone with a point, before the point is called the culprit
ANCHOR = Gemm(m=2048, n=2048, k=2048, dtype="bf16")


class Pending:
    """The points in flight and those after them, on disk."""

    def __init__(self, root: Path, gpu: str) -> None:
        self.path = root / ".journal" / f"pending-{gpu}.json"

    def write(self, now: Sequence[Chosen], after: Sequence[Chosen], deaths: int = 0) -> None:
        """Before anything is done with the points ``now``."""
        plain = {"now": _plain(now), "after": _plain(after), "deaths": deaths}
        store.write_atomic(self.path, json.dumps(plain).encode())

    def read(self) -> tuple[list[Chosen], list[Chosen], int]:
        """What an earlier worker was at, what came after, and how often it died on it before."""
        if not self.path.is_file():
            return [], [], 0
        found = json.loads(self.path.read_text())
        return _chosen(found["now"]), _chosen(found["after"]), int(found["deaths"])


def _plain(chosen: Sequence[Chosen]) -> list[dict[str, Any]]:
    return [{"family": f.name, "point": asdict(p), "repeat": n} for f, p, n in chosen]


def _chosen(plain: Sequence[dict[str, Any]]) -> list[Chosen]:
    known = families()
    return [
        (known[c["family"]], known[c["family"]].params(**c["point"]), c["repeat"]) for c in plain
    ]


def sweep_in_chunks(sweep: Sweep, device: Device, journal: store.Journal) -> None:
    """Measure until the budget is spent; SystemExit where the device broke."""
    pending = Pending(Path(sweep.order.root), sweep.order.gpu)
    alone, deaths = _left_over(pending, sweep, journal)
    anchor = families()["gemm"].build(ANCHOR, device.name).run
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < sweep.order.budget_s:
        chosen = [alone.popleft()] if alone else choose_chunk(sweep, now)
        if not chosen:
            break
        pending.write(chosen, list(alone), deaths)
        deaths = 0
        chunk = Chunk(device, chosen, anchor)
        try:
            rows = chunk.measure(sweep)
        except Broken as exc:
            if len(chosen) == 1:
                journal.append([failed_row(sweep, chosen[0], str(exc))])
                pending.write([], list(alone))
            raise SystemExit(EXIT_BROKEN) from exc
        journal.append(rows)
        alone += chunk.later
        pending.write([], list(alone))
        sweep.settle(rows)


def _left_over(pending: Pending, sweep: Sweep, journal: store.Journal) -> tuple[deque[Chosen], int]:
    """Points to measure one by one, and how often a worker died on the first of them."""
    now, after, deaths = pending.read()
    alone = [c for c in (*now, *after) if sweep.row_keys(*c)["warm"] not in sweep.done]
    sweep.done |= {sweep.row_keys(*c)["warm"] for c in alone}
    if len(now) != 1 or now[0] not in alone:
        return deque(alone), 0
    if deaths + 1 < MAX_DEATHS:
        return deque(alone), deaths + 1
    journal.append([failed_row(sweep, now[0], "the worker died on it")])
    pending.write([], alone[1:])
    return deque(alone[1:]), 0


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
