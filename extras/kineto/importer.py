"""Imports torch.profiler traces as rows: kernel time of each op, and times of profiler steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from itercast.capture.base.yaml_text import facts_of
from itercast.extras.imports.base import (
    About,
    Hints,
    Imported,
    RowCollector,
    parsed_json,
    read_text,
    refuse,
    text_of,
    whole,
)
from itercast.extras.kineto.ops import answered
from itercast.extras.kineto.profiler_steps import steps_us
from itercast.extras.kineto.rows import rows_of_calls, spread
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.store import Row
from itercast.microbench.timing.traces import Trace, join, parse

ABOUT = About(**facts_of(__file__)["about"])


def read(path: Path, hints: Hints = Hints()) -> Imported:  # noqa: B008  # frozen
    """Read a trace, or a folder of traces (*.json, *.json.gz)."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.name.endswith((".json", ".json.gz")))
        if not files:
            raise refuse(path, "a folder of torch.profiler traces", "*.json and *.json.gz")
    collector = RowCollector(ABOUT, path)
    for file in files:
        _file(collector, file, hints)
    return collector.done()


def _file(collector: RowCollector, path: Path, hints: Hints) -> None:
    """Add the rows of one trace; a trace that gives none is reported by its reason."""
    try:
        text = read_text(path)
        trace = parse(parsed_json(text))
    except ValueError as exc:
        return collector.unreadable(str(exc))
    collector.readable += 1
    gpu = gpu_named(trace.device) or hints.gpu
    if not gpu:
        device = (
            f"of an unknown GPU {trace.device[:60]!r}" if trace.device else "without a GPU's name"
        )
        return collector.drop(f"trace {device}: pass the GPU")
    common = {
        "gpu": gpu,
        "stack": f"torch cuda-{text_of(trace.cuda)}" if trace.cuda else "torch",
        "run_id": collector.run_id(path, text),
        "origin": collector.name(path),
    }
    collector.drop("malformed event", trace.malformed)
    for family, rows in _op_rows(collector, trace).items():
        collector.add(family, pd.DataFrame(rows).assign(**common))
    if steps := steps_us(trace):
        row = _step_row(trace, steps, path)
        collector.add("iteration", pd.DataFrame([row]).assign(**common))
    return None


def _op_rows(collector: RowCollector, trace: Trace) -> dict[str, list[Row]]:
    """Rows by family, one per parameters: the median over calls."""
    per_call, orphans = join(trace, answered)
    collector.drop("kernel without an op", orphans)
    rows, unknown = rows_of_calls(trace, per_call)
    for reason, count in unknown.items():
        collector.drop(reason, count)
    return {
        name: [{"timer": "device", **row} for row in of_family] for name, of_family in rows.items()
    }


def _step_row(trace: Trace, steps: list[float], path: Path) -> Row:
    """The row of the profiled iteration; a trace states neither the model nor the batch."""
    train = any("Backward" in op.name for op in trace.ops)
    ranks = whole(trace.distributed.get("world_size")) or 1
    return {
        "op": "train_step" if train else "infer_step",
        "timer": "with_launch",
        "dtype": "",
        "case": path.name.split(".")[0],
        "mode": "train" if train else "infer",
        "world_size": ranks,
        "plan": "",
        "doubts": "profiled: slower on the host than without; batch and plan are not in a trace",
        **spread(steps),
    }
