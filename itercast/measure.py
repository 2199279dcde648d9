"""Measured iterations on this CPU, corrected for the machine's speed at that moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from microbench import store
from microbench.cases.registry import EvalCase
from microbench.hardware.machine import cpu_name


def measure_round(
    chosen: Sequence[EvalCase], repetitions: int, root: Path | None
) -> Iterator[dict[str, Any]]:
    """One row per case; the anchor's reference is the sweep's, where there was one."""
    import os

    import torch

    from microbench.iterations import measure_case
    from microbench.step import StepSettings
    from microbench.timing import Anchor, keep_freed_memory

    keep_freed_memory()
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    anchor = Anchor()
    known = store.read_anchor(root.parent / "datasets", cpu_name()) if root else {}
    reference_us = known.get(cores) or anchor.reference_us()
    for one in chosen:
        yield measure_case(
            one,
            StepSettings(),
            "cpu",
            repetitions=repetitions,
            between=lambda: reference_us / anchor.time_us(),
        )
