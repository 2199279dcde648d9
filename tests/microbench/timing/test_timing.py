"""What runs right before a timed call, and what is taken off its time."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.ops.family import Workload
from itercast.microbench.timing.clock import CallCost, Clock, clock_of, time_warm_cpu
from itercast.microbench.timing.host_timing import launch_us


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
        self.nbytes = {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mul.out" in str(func):
            self.nbytes.add(result.nbytes)
        return result


@pytest.mark.parametrize(
    ("cold_share", "mib"), [({"8": 0.5, "16": 0.97, "128": 1.0}, 16), ({}, 128)]
)
def test_a_flush_reads_and_writes_until_nothing_is_warm(
    cold_share: dict[str, float], mib: int
) -> None:
    """After 16 MiB 97 % of an access are cold: 8 are read and 8 written; unknown: 128."""
    clock, x = Clock(0, cold_share), torch.ones(8)
    with Sizes() as sizes:
        clock.time(Workload(run=x.neg), "cold")
    assert max(sizes.nbytes) == mib * 2**20 / 2


def test_a_small_op_keeps_a_time_of_its_own() -> None:
    """Of ten tries most lie well above the least that can be reported."""
    clock, x = Clock(0, {"8": 1.0}), torch.ones(64)
    tries = [
        clock.time(Workload(run=lambda: torch.ops.aten.sqrt(x)), "warm").time_us for _ in range(10)
    ]
    assert statistics.median(tries) > 0.8


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
