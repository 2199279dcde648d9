"""What all stages of a campaign share: the folder of rows, points, notes, progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from itercast.microbench.sweep.collect import collect_for

log = logging.getLogger("itercast.campaign")


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
