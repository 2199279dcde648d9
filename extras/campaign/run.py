"""What all stages of a campaign share: the folder of rows, points, notes, progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from itercast.microbench import store
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.collect import (
    GRACE_S,
    Progress,
    captured_points_file,
    named_families,
    order_of,
    run_workers,
)
from itercast.microbench.sweep.orders import phases

log = logging.getLogger("itercast.campaign")
MIN_PHASE_S = 12.0  # a worker takes most of it to start


def collect_for(
    root: Path,
    device: str,
    names: Sequence[str] | None,
    seconds: float,
    seed: int = 0,
    progress: Progress | None = None,
    wanted: Path | None = None,
    grace_s: float = GRACE_S,
    devices: int = 1,
) -> int:
    """Sweep for ``seconds`` of wall time, starts of workers included; returns the new rows' number.

    ``names``: families, None for all; ``wanted``: a file of the only points to measure. Time that
    earlier runs spent does not count. A worker is killed ``grace_s`` after its time; a later sweep
    measures the points that it had not written.
    """
    end_s = time.monotonic() + seconds
    facts = card_facts(root, device)
    rows = store.compact(root, facts)
    points = wanted or captured_points_file(root, device, seed)
    waiting = phases(device, named_families(names, wanted), devices=devices)
    while waiting:
        begin_s, share = time.monotonic(), waiting[0].share / sum(p.share for p in waiting)
        left_s, phase = end_s - begin_s, waiting.pop(0)
        budget_s = min(left_s, max(share * left_s, MIN_PHASE_S))
        if budget_s < 1:
            log.info("skipped, no time is left: %s", " ".join(phase.families))
            continue
        order = order_of(root, device, facts, phase, points, seed)
        order = replace(order, budget_s=budget_s, begin_s=begin_s, only=bool(wanted))
        run_workers(order, progress, grace_s)
        rows += store.compact(root, facts)
    return rows


@dataclass(slots=True, kw_only=True)
class Run:
    """What all stages share: the folder of rows, a file of points, ``notes`` for the summary."""

    root: Path
    seed: int
    points: Path | None
    devices: int = 1  # GPUs that share the work
    notes: list[str] = field(default_factory=list)
    on_progress: Callable[[], None] = lambda: None

    def note(self, line: str) -> None:
        """Log a line, and repeat it in the summary at the end."""
        log.info("%s", line)
        self.notes.append(line)

    def progress(self, *_: object) -> None:
        """Report progress to ``on_progress``; sweeps call this a few times a second."""
        self.on_progress()

    def sweep(
        self,
        names: Sequence[str] | None,
        budget_s: float,
        grace_s: float,
        wanted: Path | None = None,
    ) -> int:
        """Sweep families on the GPU for ``budget_s`` of wall time; returns the new rows' number."""
        return collect_for(
            self.root,
            "cuda",
            names,
            budget_s,
            self.seed,
            self.progress,
            wanted,
            grace_s,
            self.devices,
        )
