"""Measured iterations on this CPU, with the machine's speed at that moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from microbench.cases.registry import EvalCase


def measure_round(chosen: Sequence[EvalCase], repetitions: int) -> Iterator[dict[str, Any]]:
    """One row of family ``iteration`` per case, on all cores."""
    import os

    import torch

    from microbench.iterations import measure_case
    from microbench.step import StepSettings
    from microbench.timing import Anchor, keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    anchor = Anchor()
    for one in chosen:
        yield measure_case(
            one, StepSettings(), "cpu", repetitions=repetitions, anchor=anchor.time_us
        )
