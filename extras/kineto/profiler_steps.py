"""Times of the steps that a torch.profiler trace marks."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from itercast.extras.imports.base import parsed_json, read_text
from itercast.microbench.timing.traces import Trace, parse

STEP = re.compile(r"ProfilerStep#\d+")


def step_us(path: Path) -> float:
    """Median time of a trace's profiler steps in us; ValueError where it is none or has none."""
    try:
        steps = steps_us(parse(parsed_json(read_text(path))))
    except ValueError as exc:
        raise ValueError(f"trace {str(path)!r}: {exc}") from None
    if not steps:
        raise ValueError(f"trace {str(path)!r} has no ProfilerStep: call step() of the profiler")
    return median(steps)


def steps_us(trace: Trace) -> list[float]:
    """Times of a trace's profiler steps in us."""
    return [op.duration_us for op in trace.ops if STEP.fullmatch(op.name)]
