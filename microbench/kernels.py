"""Which kernels each of several runs launched: one profiler session, read from its trace."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "itercast run "
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
NAME_LENGTH = 120  # of a kernel; template arguments go on for thousands of letters
NAMES = 8  # of kernels written down


def profile(runs: Sequence[Callable[[], object]], wait: Callable[[], None]) -> dict[str, Any]:
    """A torch.profiler trace in which every run stands under ``MARK`` and its number."""
    from torch import profiler  # lazy: traces are read where torch is absent

    kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=kinds) as session:
        for number, run in enumerate(runs):
            with profiler.record_function(f"{MARK}{number}"):
                run()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(errors="replace"))
    return found


def kernels_by_run(trace: Mapping[str, Any], runs: int) -> list[list[tuple[str, float]]]:
    """(name, duration in us) of the kernels, copies and fills each run launched, in launch order.

    A kernel belongs to the run during which the host launched it, on whatever thread.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(MARK)))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    starts = [begin for begin, _, _ in marks]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    found: list[list[tuple[float, str, float]]] = [[] for _ in range(runs)]
    for event in events:
        at = launched.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in KERNELS or at is None:
            continue
        index = bisect_right(starts, at) - 1
        if index >= 0 and at <= marks[index][1]:
            found[marks[index][2]].append((at, event["name"], float(event["dur"])))
    return [[(name, us) for _, name, us in sorted(run)] for run in found]


def kernel_facts(kernels: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Columns of a row: distinct names in order, the number of kernels, their summed time."""
    if not kernels:
        return {}
    names = list(dict.fromkeys(name[:NAME_LENGTH] for name, _ in kernels))
    return {
        "kernels": "; ".join(names[:NAMES]),
        "kernel_count": len(kernels),
        "kernel_us": sum(us for _, us in kernels),
    }
