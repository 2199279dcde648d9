"""A rehearsal of GPU runs on a CPU:

    PYTHONPATH=tests/standin python -m itercast.extras.campaign --budget 60s \\
        --out /tmp/rehearsal

On PYTHONPATH this stands in for ``torch.cuda`` in every process: tensors of device "cuda" are made
on the CPU, events read the host's clock. The GPU is called "standin"; its times mean nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

CYCLES_PER_US = 2000.0
MEMORY_BYTES = 2**31
PROPERTIES = SimpleNamespace(
    name="standin",
    uuid=f"standin-{os.environ.get('CUDA_VISIBLE_DEVICES') or 0}",
    major=9,
    minor=0,
    multi_processor_count=4,
    total_memory=MEMORY_BYTES,
    L2_cache_size=2**20,
    clock_rate=2e6,  # kHz
    memory_clock_rate=1e6,  # kHz
    memory_bus_width=512,
)


class Clock:
    """The device's time: the host's, and what it was told to sleep."""

    slept_us = 0.0

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3 + self.slept_us

    def sleep(self, cycles: int) -> None:
        self.slept_us += cycles / CYCLES_PER_US


CLOCK = Clock()


class Event:
    """As torch.cuda.Event; work is done when it is queued."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at_us = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_us = CLOCK.now_us()

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1e3

    def query(self) -> bool:
        return False  # the host is always ahead

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def device_count() -> int:
    """``STANDIN_GPUS``, or 1; fewer where CUDA_VISIBLE_DEVICES lists fewer."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(listed.split(",")) if listed else int(os.environ.get("STANDIN_GPUS") or 1)


def on_cpu(value: Any) -> Any:
    """The value, the CPU where it names the GPU."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return "cpu" if getattr(value, "type", None) == "cuda" and hasattr(value, "index") else value


def stand_in_for_cuda(torch: Any) -> None:
    """What torch.cuda is asked for; graphs cannot be captured."""
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": device_count,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": lambda device=None: (2**27, MEMORY_BYTES),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "_sleep": CLOCK.sleep,
        "Event": Event,
        "current_stream": lambda device=None: SimpleNamespace(
            wait_stream=lambda other: None, synchronize=lambda: None
        ),
        "Stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        found[name] = lambda device=None: 0
    for name, value in found.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nccl.version = lambda: (0, 0, 0)

    class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Every call of torch with the CPU instead of the GPU."""

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            return function(*(on_cpu(value) for value in args), **given)

    OnCpu().__enter__()


def make_chunks_short(module: Any) -> None:
    """A product of 2048 in bf16 takes half a minute on a CPU without bf16 instructions."""
    module.SAMPLES = (2, 2)
    module.GpuBench.points = 40
    module.ANCHOR = replace(module.ANCHOR, m=16, n=16, k=16)


def make_points_few(module: Any) -> None:
    """``STANDIN_POINTS`` of each family, so that a sweep ends; else as many as time allows."""
    most, whole = os.environ.get("STANDIN_POINTS"), module.space
    if most:
        module.space = lambda *args: islice(whole(*args), int(most))


def leave_out_profiles(module: Any) -> None:
    """A profiler that looks for a GPU warns of every op; runs are run, nothing is seen."""

    def profile(runs: Sequence[Callable[[], object]], *_: Any, **__: Any) -> Any:
        for run in runs:
            run()
        return module.Trace()

    module.profile = profile


def make_the_device_quick(module: Any) -> None:
    module.WARM_UP_S = 0.0


def make_points_small(module: Any) -> None:
    module.MAX_ROOFLINE_US = 0.5
    module.MAX_BYTES_FRAC = 1e5 / MEMORY_BYTES


def make_iterations_few(module: Any) -> None:
    """Two of tiny models, and a graph, which fails here."""
    from itercast.capture.step import TIMINGS
    from itercast.microbench.iterations.measure import Iteration

    tiny = {"case": "mlp-s", "dtype": "fp32", "optimizer": "sgd"}
    listed = [Iteration(batch=n, **tiny) for n in (2, 4)]
    module.gpu_iterations = lambda: [*listed, Iteration(batch=2, engine="graph", **tiny)]
    module.iterations_of = lambda stage: [
        Iteration(batch=2, timing=timing, **tiny)
        for timing in (TIMINGS if stage == "hosts" else TIMINGS[:1])
    ]


def make_timing_short(module: Any) -> None:
    module.GPU_TIME_S = (0.05, 0.1)


def time_ops_on_the_host(module: Any) -> None:
    """There are no kernels in a trace."""
    record = module.record
    module.record = lambda run, on_gpu, shapes: record(run, on_gpu=False, shapes=shapes)
    module.join = lambda trace, owns: (module.host_times(trace, owns), 0)


def make_products_short(module: Any) -> None:
    module.FACTS = {**module.FACTS, "seconds": 0.02, "mib": [1], "beside": 64}


def make_rounds_few(module: Any) -> None:
    module.ROUNDS = 2


AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "torch": stand_in_for_cuda,
    "itercast.microbench.sweep.gpu_chunks": make_chunks_short,
    "itercast.microbench.sweep.scheduler": make_points_few,
    "itercast.microbench.timing.kernels": leave_out_profiles,
    "itercast.microbench.timing.cuda_device": make_the_device_quick,
    "itercast.microbench.sweep.gpu_space": make_points_small,
    "itercast.microbench.iterations.gpu_list": make_iterations_few,
    "itercast.microbench.iterations.measure": make_timing_short,
    "itercast.extras.kineto.in_step": time_ops_on_the_host,
    "itercast.extras.campaign.second": make_rounds_few,
    "itercast.extras.campaign.steady": make_products_short,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as ever, and changes some of them once they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_change(module: ModuleType) -> None:
            execute(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
