"""What a GPU sweep asks of CUDA, with torch's CUDA calls stood in for; kernels."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from clockwork import event, order

from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import compact, read_rows, write_part
from itercast.microbench.sweep import collect as collect_module
from itercast.microbench.sweep import gpu_chunks, worker
from itercast.microbench.sweep.rows import failure_status
from itercast.microbench.sweep.scheduler import Sweep
from itercast.microbench.timing.cuda_device import CudaDevice
from itercast.microbench.timing.kernels import MARK
from itercast.microbench.timing.nvml import Nvml, combined, is_throttled, reasons
from itercast.microbench.timing.traces import Trace, parse

H100 = load_gpu("h100-sxm-80gb")


class Stream:
    """Stands in for a CUDA stream whose device is ``late_us`` behind the host, and its memory."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.late_us = 100.0
        self.reserved_bytes = 0
        self.log: list[str] = []

    def sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.now_us += cycles / 2000  # a clock of 2 GHz

    def event(self, enable_timing: bool) -> Any:
        stream, event = self, SimpleNamespace(at_us=0.0)

        def record() -> None:
            stream.log.append("event")
            event.at_us = stream.now_us

        event.record = record
        event.query = lambda: stream.late_us <= 0
        event.elapsed_time = lambda end: (end.at_us - event.at_us) / 1e3
        return event


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """torch.cuda on a stream that is none; tensors of a GPU are those of the CPU."""
    found = Stream()
    stand_ins: dict[str, Any] = {
        "get_device_properties": lambda index: SimpleNamespace(uuid="none"),
        "mem_get_info": lambda: (2**20, 2**21),
        "memory_allocated": lambda: 0,
        "memory_reserved": lambda: found.reserved_bytes,
        "set_per_process_memory_fraction": lambda frac: found.log.append(f"at most {frac}"),
        "synchronize": lambda: found.log.append("wait"),
        "empty_cache": lambda: found.log.append("empty_cache"),
        "_sleep": found.sleep,
        "Event": found.event,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    makers = (
        "empty",
        "randn",
        "rand",
        "randint",
        "randperm",
        "arange",
        "zeros",
        "ones",
        "full",
        "tensor",
    )
    for name in makers:
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    monkeypatch.setattr("itercast.microbench.timing.cuda_device.WARM_UP_S", 0.0)
    monkeypatch.setattr("itercast.microbench.timing.kernels.DETACH_S", 0.01)
    return found


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes tensors on the CPU wherever it was asked to."""

    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{k: v for k, v in kwargs.items() if k != "device"})

    return made


def test_a_cold_sample_is_flushed_and_all_are_queued_behind_a_sleep(stream: Stream) -> None:
    device = CudaDevice(l2_bytes=1e6)
    assert device._cycles_per_us == pytest.approx(2000)
    assert device.arena_bytes == int(0.85 * 2**20)

    def run() -> None:
        stream.log.append("run")
        stream.now_us += 30

    made = ["event", "event"]  # recorded once so that they exist before anything is timed
    stream.log.clear()
    cold = device.sample(run, True, 10.0)
    assert stream.log == [*made, "sleep", "event", "run", "event"]  # the flush is torch's own zero_
    stream.log.clear()
    warm = device.sample(run, False, 10.0)
    assert stream.log == [*made, "sleep", "run", "event", "run", "event"]
    assert device.elapsed_us(cold) == device.elapsed_us(warm) == pytest.approx(30)
    before_us = stream.now_us
    device.sample(run, False, 1e9)
    assert stream.now_us - before_us < 5000 + 61  # no launch is waited for longer


def test_a_sample_starved_where_the_device_had_caught_up(stream: Stream) -> None:
    device = CudaDevice(l2_bytes=1e6)
    assert not device.sample(device.tiny, True, 10.0).starved
    stream.late_us = 0.0
    assert device.sample(device.tiny, True, 10.0).starved


def test_memory_is_left_for_cuda_itself(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB is free. The arena is 85 % of it, and taken anew only where half of it is gone."""
    taken: list[int] = []
    empty = torch.empty

    def take(size: int, **kwargs: Any) -> Any:
        taken.append(size)
        return empty(1)

    monkeypatch.setattr(torch, "empty", take)
    device = CudaDevice(l2_bytes=1e6)
    arena = int(0.85 * 2**20)
    assert "at most 0.9" in stream.log and taken == [2_000_000, arena]
    stream.reserved_bytes = arena // 2 + 1
    device.reset()
    assert stream.log[-1] == "empty_cache" and taken[2:] == []
    stream.reserved_bytes = arena // 4
    device.reset()
    assert taken[2:] == [arena - arena // 4]


def test_one_failing_profile_does_not_end_profiling(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row do. Without a GPU every session is without a kernel."""
    device, sessions = CudaDevice(l2_bytes=1e6), []

    def session(runs: Any, wait: Any, first: Any) -> Trace:
        sessions.append(len(runs))
        return parse(kernel_trace) if len(sessions) == 2 else Trace()

    monkeypatch.setattr("itercast.microbench.timing.cuda_device.profile", session)
    kernel_trace = {
        "traceEvents": [
            event("user_annotation", 0, 10, f"{MARK}0"),
            event("cuda_runtime", 5, 1, "cudaLaunchKernel", correlation=1),
            event("kernel", 100, 7, "gemm", correlation=1),
        ]
    }
    found = [device.kernels([device.tiny]) for _ in range(6)]
    assert found == [[[]], [[("gemm", 7.0)]], [[]], [[]], [[]], [[]]]
    assert len(sessions) == 4


def test_tf32_is_on_for_tf32_alone(stream: Stream) -> None:
    device = CudaDevice(l2_bytes=1e6)
    device.settings("tf32")
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    device.settings("fp32")
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


def test_a_sweep_of_all_families_on_the_stand_in(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker as on a GPU, the small points of its space, really run: rows of every family."""
    monkeypatch.setattr(gpu_chunks, "ANCHOR", Gemm(m=16, n=16, k=16))  # bf16 is slow here
    chunks = iter([Sweep.choose_chunk])  # one, however slow the machine
    monkeypatch.setattr(
        Sweep, "choose_chunk", lambda s, now_s, *_: next(chunks, lambda *_: [])(s, now_s, 39, 20.0)
    )
    for group in ("SHARDED", "WRAPPERS"):  # these ask torch for CUDA itself
        monkeypatch.setattr(f"itercast.microbench.ops.step.host.{group}", ())
    monkeypatch.setattr("itercast.microbench.sweep.gpu_chunks.SAMPLES", (2, 2))
    monkeypatch.setattr("itercast.microbench.sweep.gpu_space.MAX_ROOFLINE_US", 0.05)
    monkeypatch.setattr("itercast.microbench.sweep.gpu_space.MAX_BYTES_FRAC", 2e5 / H100.hbm_bytes)
    names = tuple(n for n, f in families().items() if f.ranks == 1 and not f.on_demand)
    asked = replace(
        order(tmp_path, *names, budget_s=600.0), device="cuda", gpu="h100", hardware=H100.to_dict()
    )
    worker.run(asked)
    compact(tmp_path, {})
    for name in names:
        rows = read_rows([tmp_path], name)
        assert len(rows), name
        assert (rows["status"] == "ok").mean() > 0.5, (name, set(rows["reason"]))
        assert set(rows["timer"]) == {"with_launch" if name == "host" else "device"}
        assert set(rows["threads"]) == {0}
    assert set(read_rows([tmp_path], "norm")["cache"]) == {"warm", "cold"}


def test_readings_are_combined_and_reasons_have_names() -> None:
    """The middle clock and the least, and every reason that was seen."""
    readings = [
        {"sm_clock_hz": 3.0, "throttle": "power_cap"},
        {"sm_clock_hz": 1.0, "throttle": "idle power_cap"},
        {"sm_clock_hz": 4.0},
    ]
    found = {"sm_clock_hz": 3.0, "sm_clock_hz_min": 1.0, "throttle": "idle power_cap"}
    assert combined(readings) == found and combined([]) == {}
    assert reasons(0x4 | 0x20) == ("power_cap", "sw_thermal")
    assert is_throttled({"throttle": "power_cap sw_thermal"})
    assert not is_throttled({"throttle": "power_cap"})
    assert Nvml("none").read() == {}  # no GPU here, or none of that name


def test_groups_have_budgets_of_their_own(tmp_path: Path) -> None:
    facts = {"gpu": "x", "threads": 0}
    rows = [{**facts, "ranks_per_node": n, "cost_s": 1.5} for n in (2, 2, 4)]
    write_part(tmp_path, "collective", "x", pd.DataFrame(rows), "one")
    for ranks, spent_s in ((2, 3.0), (4, 1.5), (8, 0.0)):
        phase = collect_module.Phase(families=("collective",), threads=0, share=0.1, ranks=ranks)
        assert collect_module.spent_s(tmp_path, "x", phase) == spent_s


def test_failures_are_told_apart() -> None:
    assert failure_status(RuntimeError("CUDA out of memory. Tried")) == "oom"
    assert failure_status(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")) == "oom"
    for text in ("CUBLAS_STATUS_NOT_SUPPORTED when calling", "No available kernel. Aborting"):
        assert failure_status(RuntimeError(text)) == "unsupported"
    assert failure_status(RuntimeError("\"x\" not implemented for 'Half'")) == "unsupported"
    assert failure_status(RuntimeError("something else")) == "error"


def test_a_broken_worker_is_started_again_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers break, the third ends well; each gets what is left of the budget."""
    budgets: list[float] = []

    def start(asked: collect_module.WorkerOrder) -> subprocess.Popen[bytes]:
        budgets.append(asked.budget_s)
        code = 75 if len(budgets) < 3 else 0
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])

    monkeypatch.setattr(collect_module, "start_worker", start)
    collect_module.run_worker(order(tmp_path, "toy", budget_s=30.0), None)
    assert len(budgets) == 3
    assert 30.0 == budgets[0] > budgets[1] > budgets[2] > 20.0


def test_a_worker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(asked: collect_module.WorkerOrder) -> subprocess.Popen[bytes]:
        wait_s = 60 if not started else 0
        started.append(
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({wait_s})"])
        )
        return started[-1]

    monkeypatch.setattr(collect_module, "start_worker", start)
    monkeypatch.setattr(collect_module, "STALLED_S", 0.5)
    collect_module.run_worker(replace(order(tmp_path, "toy"), device="cuda"), None)
    assert [p.returncode for p in started] == [-9, 0]
