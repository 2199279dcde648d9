"""Reads torch.profiler traces: kernel time of each op, and times of profiler steps."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from itercast.microbench.importers.base import parsed_json, read_text
from itercast.microbench.importers.traces.kineto_ops import answered, describe
from itercast.microbench.store import Row
from itercast.microbench.timing.traces import Trace, parse

UNKNOWN = "op not described by a family"
STEP = re.compile(r"ProfilerStep#\d+")


def step_us(path: Path) -> float:
    """Median time of a trace's profiler steps in us; ValueError where it is none or has none."""
    try:
        steps = steps_us(parse(parsed_json(read_text(path))))
    except ValueError as exc:
        raise ValueError(f"trace {str(path)!r}: {exc}") from None
    if not steps:
        raise ValueError(f"trace {str(path)!r} has no ProfilerStep: call step() of the profiler")
    return float(np.median(steps))


def steps_us(trace: Trace) -> list[float]:
    """Times of a trace's profiler steps in us."""
    return [op.duration_us for op in trace.ops if STEP.fullmatch(op.name)]


def rows_of_calls(
    trace: Trace, per_call: Mapping[int, float]
) -> tuple[dict[str, list[Row]], Counter[str]]:
    """Rows by family of timed calls, one per parameters, and why others have none.

    ``per_call``: us by the index of an op in the trace; a row has their median.
    """
    times: dict[Any, list[float]] = defaultdict(list)
    unknown: Counter[str] = Counter()
    for at, time_us in per_call.items():
        op = trace.ops[at]
        found = describe(op.name, op.args)
        if found is None:
            bare = answered(op.name) and "Input Dims" not in op.args
            reason = "op without shapes, record_shapes was off" if bare else UNKNOWN
            unknown[f"{reason}: {op.name[:60]}"] += 1
        else:
            times[found].append(time_us)
    rows: dict[str, list[Row]] = defaultdict(list)
    for (family, point), samples in times.items():
        rows[family].append({**asdict(point), **spread(samples)})
    return rows, unknown


def spread(samples: list[float]) -> Row:
    low, middle, high = np.percentile(samples, [20, 50, 80])
    spread = {"time_us_p20": float(low), "time_us_p80": float(high)}
    return {"time_us": float(middle), **spread, "samples": len(samples)}
