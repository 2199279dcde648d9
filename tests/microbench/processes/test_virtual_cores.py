"""Before something is timed, virtual cores that are one core are given the time to come apart."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from itercast.microbench.processes.virtual_cores import VirtualCores


class Told(VirtualCores):
    """Times as told in place of measured ones."""

    def __init__(self, *times_s: tuple[float, float], ranks: int = 1) -> None:
        super().__init__()
        self.ranks, self.told = ranks, iter(times_s)

    def times_s(self) -> tuple[float, float]:
        return next(self.told)

    def _load(self, until_s: float) -> None:
        pass

    def _of_all(self, seconds: float) -> float:
        return seconds + 4.0  # each takes four seconds


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_it_waits_until_two_cores_are_faster_than_one() -> None:
    """1.33 ms on one thread and on two: one core. 1.70 and 0.85 ms: two cores."""
    cores = Told((1.33, 1.33), (1.70, 0.85), (9.0, 9.0))
    cores.settle()
    assert next(cores.told) == (9.0, 9.0) and cores.wait_left_s == pytest.approx(6.0, abs=0.1)


def test_ranks_on_one_core_slow_each_other() -> None:
    """A rank of two takes as long as alone where each has a core, and twice as long on one core."""
    cores = Told((1.3, 2.6), (1.7, 1.7), (9.0, 9.0), ranks=2)
    cores.settle()
    assert next(cores.told) == (9.0, 9.0)


def test_patience_ends_once_for_a_process() -> None:
    """Cores that never come apart cost ten seconds, not ten seconds a point."""
    cores = Told(*[(1.0, 1.0)] * 9)
    cores.settle()
    cores.settle()
    assert len(list(cores.told)) == 9 - 3


def test_a_short_sweep_waits_for_a_tenth_of_its_time() -> None:
    assert VirtualCores(budget_s=20.0).wait_left_s == 2.0
    assert VirtualCores(budget_s=1e3).wait_left_s == VirtualCores().wait_left_s == 10.0


def test_one_thread_waits_for_nothing() -> None:
    torch.set_num_threads(1)
    Told().settle()


def test_one_thread_and_all_are_timed() -> None:
    cores = VirtualCores()
    assert all(1e-5 < s < 1.0 for s in cores.times_s())
    assert torch.get_num_threads() == 2


def test_ranks_agree_on_times_and_wait_for_each_other() -> None:
    """Two real ranks over gloo, one thread each: alone in turns, then together."""
    program = """
import torch
from itercast.microbench.processes.ranks import join_process_group, max_over_ranks
from itercast.microbench.processes.virtual_cores import VirtualCores
torch.set_num_threads(1)
join_process_group("cpu")
cores = VirtualCores(ranks=2)
times = cores.times_s()
assert list(times) == max_over_ranks(list(times)) and all(times)
cores.settle()
torch.distributed.destroy_process_group()
"""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [sys.executable, *launch, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
