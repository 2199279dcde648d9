"""Clocks: what runs before a timed call and is taken off its time; kernels read from traces."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from clockwork import event
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.hardware import machine
from itercast.microbench.hardware.machine import shares_of
from itercast.microbench.ops.family import Workload
from itercast.microbench.timing.clock import Anchor, CallCost, Clock, clock_of, time_warm_cpu
from itercast.microbench.timing.host_timing import launch_us
from itercast.microbench.timing.kernels import (
    MARK,
    kernel_facts,
    kernels_by_run,
    profile,
    timing_disagreement,
)
from itercast.microbench.timing.traces import parse


class Log(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def last_op(run: Any) -> str:
    with Log() as log:
        run()
    return log.ops[-1]


def test_the_wrapper_is_warm_when_a_call_goes_through_it() -> None:
    """Cold, torch.ops.aten's wrapper costs more than a small op: no median takes that off."""
    cost = CallCost(lambda: torch.ones(1))
    assert last_op(cost.before[True]) == "aten.neg.default"
    assert last_op(cost.before[False]) == "aten.ones.default"


class Sizes(TorchDispatchMode):
    """Bytes that products write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mul.out" in str(func):
            self.nbytes.append(result.nbytes)
        return result


@pytest.mark.parametrize(
    ("cold_share", "mib"), [({"8": 0.5, "16": 0.99, "128": 1.0}, 64), ({}, 1024)]
)
def test_a_flush_reads_and_writes_until_nothing_is_warm(
    cold_share: dict[str, float], mib: int
) -> None:
    """A lap of 16 MiB finds 99 % cold: of four times as many half is read, half written.

    An untimed lap and three samples of three ops share four flushes; a twin runs before each.
    """
    clock, x, ran = Clock(0, cold_share), torch.ones(8), []
    pair = (Workload(run=lambda: ran.append("op")), Workload(run=lambda: ran.append("twin")))
    with Sizes() as sizes:
        clock.time_cold([pair, pair, (Workload(run=x.neg), None)])
    flushes = [n for n in sizes.nbytes if n > 2**20]
    assert flushes == [mib * 2**20 // 2] * 4
    assert ran == ["twin", "op"] * 8


def test_a_lap_that_others_disturbed_does_not_tell_when_data_leave_the_cache() -> None:
    """Warm 1 us, cold 5 us, half of it at 2 us more: medians of three rounds of six sizes."""
    quiet = [1.0, 1.0, 3.0, 5.0, 5.0, 5.0]
    disturbed, other = [1.0, 4.0, 3.0, 5.0, 5.0, 40.0], [9.0, 1.0, 3.0, 5.0, 20.0, 5.0]
    assert shares_of([quiet, disturbed, other]) == [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert shares_of([[1.0, 1.5, 1.2, 2.0, 3.0, 3.5]]) == [0.0, 0.25, 0.25, 0.5, 1.0, 1.0]


def test_second_uses_are_timed_of_data_that_were_not_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An add of 1/8 MiB in laps of one, two and four: each place twice, then the next places."""
    places: list[int] = []
    add = torch.add

    def noted(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        places.append(x.data_ptr())
        return add(x, y, out=out)

    monkeypatch.setattr(machine, "TOUCHED_MIB", (0.125, 0.25, 0.5))
    monkeypatch.setattr(machine, "COLD_LAPS_MIB", 0.5)
    monkeypatch.setattr(machine, "COLD_ROUNDS", 1)
    monkeypatch.setattr(torch, "add", noted)
    again, second = machine.measure_cold_shares()
    assert list(again) == list(second) == ["0.125", "0.25", "0.5"]
    seconds = places[-24:]  # eight of each size
    one, two, four = seconds[:8], seconds[8:16], seconds[16:]
    assert one[::2] == one[1::2] and len(set(one)) == 4
    assert [two[:2], two[4:6]] == [two[2:4], two[6:]] and len(set(two)) == 4
    assert four[:4] == four[4:] and len(set(four)) == 4


def test_the_result_of_a_timed_op_does_not_get_the_memory_that_its_twin_just_used() -> None:
    """The twin's result is kept until the op has run."""
    clock, x, results = Clock(0, {"8": 1.0}), torch.ones(1000), []

    def run() -> Any:
        made = torch.neg(x)
        results.append(made.data_ptr())
        return made

    clock.time_cold([(Workload(run=run), Workload(run=run))])
    assert len(results) == 8 and all(
        a != b for a, b in zip(results[::2], results[1::2], strict=True)
    )


def test_what_shows_the_speed_runs_until_it_is_warm_before_it_is_timed() -> None:
    """Nine products are timed; 24 come before, whatever ran before those."""
    anchor = Anchor()
    with Log() as log:
        assert set(anchor.times_us()) == {"anchor_us", "serial_us"}
    assert log.ops.count("aten.mm.default") == 24 + 9


def test_time_of_one_thread_leaves_out_what_other_processes_take() -> None:
    """A sleep stands for a core that another process has: only wall time goes on."""
    assert clock_of(1) is time.thread_time_ns
    assert clock_of(2) is clock_of(0) is time.perf_counter_ns
    asleep = Workload(run=lambda: time.sleep(0.02), through_aten=False)
    by_wall = time_warm_cpu(asleep, lambda: None, clock_of(2)).time_us
    by_thread = time_warm_cpu(asleep, lambda: None, clock_of(1)).time_us
    assert by_wall >= 2e4 > 1e4 > by_thread


def test_a_launch_is_the_least_of_three_less_what_no_step_pays() -> None:
    """3 us of a baseline; without one 1.5 us for a call through torch.ops.aten, else 0.5 us."""
    cost: Any = SimpleNamespace(us=lambda through_aten: 1.5 if through_aten else 0.5)

    def nothing() -> None:
        """Not run."""

    through, bound = Workload(run=nothing), Workload(run=nothing, through_aten=False)
    assert launch_us(through, [9.0, 8.0, 30.0], [], cost) == 6.5
    assert launch_us(bound, [9.0, 8.0, 30.0], [], cost) == 7.5
    assert launch_us(replace(through, baseline=nothing), [9.0, 8.0], [4.0, 3.0], cost) == 5.0
    assert launch_us(replace(bound, calls=5), [9.0, 8.0], [], cost) == 1.5
    assert launch_us(bound, [0.6], [], cost) == 0.5  # no call from Python is cheaper


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
    found = kernels_by_run(parse(trace), 3)
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
    marks = [op for op in trace.ops if op.name.startswith(MARK)]
    assert [op.name for op in marks] == [f"{MARK}0", f"{MARK}1"]
    assert ran[:67] == 64 * ["first"] + ["add", "add", "wait"]
    assert os.environ["TEARDOWN_CUPTI"] == "1"
    adds = [op.start_us for op in trace.ops if op.name == "aten::add"]
    inside = [0 <= at - marks[0].start_us <= marks[0].duration_us for at in adds]
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
    assert kernels_by_run(parse(trace), 2) == [[], [("second", 3.0)]]


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
