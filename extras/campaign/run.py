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
    captured_points_file,
    named_families,
    order_of,
    run_workers,
)
from itercast.microbench.sweep.orders import phases

log = logging.getLogger("itercast.campaign")
MIN_PHASE_S = 12.0  # a worker takes most of it to start


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
        """Sweep on the GPU for ``budget_s`` of wall time, starts of workers included.

        ``names``: families, None for all; ``wanted``: a file of the only points to measure. Time
        that earlier runs spent does not count. A worker is killed ``grace_s`` after its time; a
        later sweep measures the points that it had not written. Returns the number of new rows.
        """
        end_s = time.monotonic() + budget_s
        facts = card_facts(self.root, "cuda")
        rows = store.compact(self.root, facts)
        points = wanted or captured_points_file(self.root, "cuda", self.seed)
        planned = phases("cuda", named_families(names, wanted), devices=self.devices)
        for i, phase in enumerate(planned):
            begin_s, share = time.monotonic(), phase.share / sum(p.share for p in planned[i:])
            left_s = end_s - begin_s
            phase_s = min(left_s, max(share * left_s, MIN_PHASE_S))
            if phase_s < 1:
                log.info("skipped, no time is left: %s", " ".join(phase.families))
                continue
            order = order_of(self.root, "cuda", facts, phase, points, self.seed)
            order = replace(order, budget_s=phase_s, begin_s=begin_s, only=bool(wanted))
            run_workers(order, self.progress, grace_s)
            rows += store.compact(self.root, facts)
        return rows
