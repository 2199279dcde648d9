"""Rows of the ops that a torch.profiler trace has, by family."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from itercast.extras.kineto.ops import answered, describe
from itercast.microbench.store import Row
from itercast.microbench.timing.traces import Trace

UNKNOWN = "op not described by a family"


def rows_of_calls(
    trace: Trace, per_call: Mapping[int, float]
) -> tuple[dict[str, list[Row]], Counter[str]]:
    """Rows by family of timed calls, one per parameters, and why others have none.

    ``per_call``: us by the index of an op in the trace; a row has their median.
    """
    times: dict[Any, list[float]] = defaultdict(list)
    unknown: Counter[str] = Counter()
    for index, time_us in per_call.items():
        op = trace.ops[index]
        described = describe(op.name, op.args)
        if described is None:
            lacks_shapes = answered(op.name) and "Input Dims" not in op.args
            reason = "op without shapes, record_shapes was off" if lacks_shapes else UNKNOWN
            unknown[f"{reason}: {op.name[:60]}"] += 1
        else:
            times[described].append(time_us)
    rows: dict[str, list[Row]] = defaultdict(list)
    for (family, point), samples in times.items():
        rows[family].append({**asdict(point), **spread(samples)})
    return rows, unknown


def spread(samples: list[float]) -> Row:
    """The columns of a row that samples make up: median, p20 and p80 in us, their number."""
    low, middle, high = np.percentile(samples, [20, 50, 80])
    percentiles = {"time_us_p20": float(low), "time_us_p80": float(high)}
    return {"time_us": float(middle), **percentiles, "samples": len(samples)}
