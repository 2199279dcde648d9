"""Kernels of profiled runs, read from traces, and whether events agree with their times."""

from __future__ import annotations

import os
from typing import Any

import pandas as pd
import pytest
import torch

from itercast.microbench.timing.kernels import (
    MARK,
    kernel_facts,
    kernels_by_run,
    profile,
    timing_disagreement,
)


def event(cat: str, ts: float, dur: float, name: str = "x", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "args": args}


def test_kernels_belong_to_the_run_that_launched_them() -> None:
    """Kernels run late and out of order; what is launched between runs is nobody's."""
    trace = {
        "traceEvents": [
            event("user_annotation", 0, 10, f"{MARK}0"),
            event("user_annotation", 20, 10, f"{MARK}1"),
            event("cuda_runtime", 5, 1, "cudaLaunchKernel", correlation=1),
            event("cuda_runtime", 25, 1, correlation=3),  # from autograd's thread
            event("cuda_driver", 22, 1, correlation=2),
            event("cuda_runtime", 15, 1, correlation=4),
            event("kernel", 100, 7, "gemm", correlation=1),
            event("kernel", 130, 3, "second", correlation=3),
            event("gpu_memset", 110, 2, "Memset", correlation=2),
            event("kernel", 120, 50, "between", correlation=4),
            event("gpu_user_annotation", 100, 7, f"{MARK}0"),
        ]
    }
    found = kernels_by_run(trace, 3)
    assert found == [[("gemm", 7.0)], [("Memset", 2.0), ("second", 3.0)], []]
    assert kernel_facts(found[1]) == {
        "kernels": "Memset; second",
        "kernel_count": 2,
        "kernel_us": 5.0,
    }
    assert kernel_facts([]) == {}


def test_the_profiler_marks_the_second_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real session, as far as a machine without a GPU goes."""
    x = torch.ones(4)
    ran: list[str] = []

    def add() -> None:
        ran.append("add")
        torch.add(x, x)

    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    trace = profile([add, lambda: x * x], lambda: ran.append("wait"), lambda: ran.append("first"))
    marks = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    assert [e["name"] for e in marks] == [f"{MARK}0", f"{MARK}1"]
    assert ran[:67] == 64 * ["first"] + ["add", "add", "wait"]
    assert os.environ["TEARDOWN_CUPTI"] == "1"
    adds = [e["ts"] for e in trace["traceEvents"] if e.get("name") == "aten::add"]
    inside = [marks[0]["ts"] <= at <= marks[0]["ts"] + marks[0]["dur"] for at in adds]
    assert inside == [False, True]  # the first finds caches as the second leaves them


def test_a_run_of_which_a_kernel_was_lost_has_none() -> None:
    """Two were launched and one was seen; the other run is whole."""
    trace = {
        "traceEvents": [
            event("user_annotation", 0, 10, f"{MARK}0"),
            event("user_annotation", 20, 10, f"{MARK}1"),
            event("cuda_runtime", 5, 1, "cudaLaunchKernel", correlation=1),
            event("cuda_runtime", 7, 1, "cudaLaunchKernelExC", correlation=2),
            event("cuda_runtime", 25, 1, "cudaLaunchKernel", correlation=3),
            event("cuda_runtime", 26, 1, "cudaStreamSynchronize", correlation=4),
            event("kernel", 100, 7, "gemm", correlation=2),
            event("kernel", 130, 3, "second", correlation=3),
        ]
    }
    assert kernels_by_run(trace, 2) == [[], [("second", 3.0)]]


def test_events_may_take_two_microseconds_more_than_the_kernel() -> None:
    """Of a 10 us kernel 9.2 to 12.8 us: 2 us of events, 0.5 us of resolution, 3 % of noise."""
    times_us = (9.1, 9.3, 12.7, 12.9)
    rows = [{"cache": "warm", "kernel_count": 1, "kernel_us": 10.0, "time_us": t} for t in times_us]
    unchecked = {"cache": "warm", "kernel_us": 10.0, "time_us": 99.0}
    rows += [
        {**unchecked, "kernel_count": 2},
        {**unchecked, "kernel_count": 1, "cache": "cold"},
        {**unchecked, "kernel_count": 1, "starved": True},
        {**unchecked, "kernel_count": 1, "synchronises": True},
        {"cache": "warm", "time_us": 99.0, "starved": False},
    ]
    assert timing_disagreement(pd.DataFrame(rows)) == (4, 2)
    assert timing_disagreement(pd.DataFrame(rows[-1:])) == (0, 0)
