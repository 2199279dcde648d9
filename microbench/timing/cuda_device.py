"""A CUDA GPU for sweeps in chunks: memory, events, an L2 flush, sleeps, a profiler.

Not in the timed window: creating CUDA events (done before it); allocating memory and cuBLAS
workspaces and loading kernels (done by a point's first run); launches, as the device sleeps until
the host has queued a whole sample. Where the host was too slow nevertheless, the sample is marked
as starved. cuDNN chooses kernels by heuristics (``cudnn.benchmark`` off), PyTorch's default.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from itercast.capture.base.slow_imports import torch
from itercast.microbench.timing.kernels import kernels_by_run, profile
from itercast.microbench.timing.nvml import Nvml, Reading

log = logging.getLogger(__name__)
Run = Callable[[], object]
Events = tuple[Any, Any]  # before a run and after it
MEMORY_FRAC = 0.9  # of the GPU's memory, for torch; CUDA modules, CUPTI and NCCL need the rest
ARENA_FRAC = 0.85  # of the free memory, taken at the start
FLUSH_PER_L2 = 2.0
SLEEP_CYCLES = 2_000_000  # about a millisecond, to measure cycles per microsecond
LEAD = 1.5  # sleep per usual queueing time: it counts SM cycles, whose rate varies by a third
LEAD_US = 15.0  # of sleep besides, for queueing a flush and two events
MAX_SLEEP_US = 5000.0
WARM_UP_S = 0.5
MAX_FAILED_PROFILES = 2  # in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that was queued between two events.

    ``host_us``: host time of the call that queued it. ``starved``: the device had passed the first
    event before the host queued the second one, so it may have waited for the host in between.
    """

    events: Events
    host_us: float
    starved: bool


class CudaDevice:
    """A CUDA GPU; it flushes caches by writing twice ``l2_bytes``.

    One large block, the arena, is allocated and freed first: torch's caching allocator then serves
    all points from it, and none waits for cudaMalloc.
    """

    name = "cuda"

    def __init__(self, l2_bytes: float) -> None:
        self.nvml = Nvml(str(torch.cuda.get_device_properties(0).uuid))
        self._failed_profiles = 0
        torch.cuda.set_per_process_memory_fraction(MEMORY_FRAC)
        self._flush_buffer = torch.empty(
            int(FLUSH_PER_L2 * l2_bytes), dtype=torch.uint8, device="cuda"
        )
        self._one = torch.ones(1, device="cuda")
        free_bytes, _ = torch.cuda.mem_get_info()
        self.arena_bytes = int(ARENA_FRAC * free_bytes)
        self._reserve(self.arena_bytes)
        self._cycles_per_us = self._calibrate()
        self._flush_us = self.elapsed_us(self._second(self._flush_buffer.zero_))

    def _reserve(self, size: int) -> None:
        """Allocate and free a block: torch's caching allocator keeps it."""
        torch.empty(size, dtype=torch.uint8, device="cuda")

    def _calibrate(self) -> float:
        """Sleep cycles per microsecond, measured after half a second of work."""
        x = torch.randn(2048, 2048, device="cuda")
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            torch.mm(x, x)
            torch.cuda.synchronize()
        return SLEEP_CYCLES / self.elapsed_us(self._second(lambda: torch.cuda._sleep(SLEEP_CYCLES)))

    def _second(self, run: Run) -> Launched:
        """Launch twice and wait; returns the second launch, as the first may load kernels."""
        run()
        launched = self.launch(run)
        self.wait()
        return launched

    def settings(self, dtype: str) -> None:
        """Turn TF32 on for dtype tf32, and off for all others."""
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        torch.backends.cudnn.allow_tf32 = dtype == "tf32"

    def allocated_bytes(self) -> int:
        """Bytes of live tensors."""
        return int(torch.cuda.memory_allocated())

    def tiny(self) -> None:
        """Launch a kernel that negates one number."""
        self._one.neg_()

    def _events(self) -> Events:
        """Two events, recorded once, as CUDA creates an event at its first record."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        return begin, end

    def _sleep(self, us: float) -> None:
        if us > 0:
            torch.cuda._sleep(int(min(us, MAX_SLEEP_US) * self._cycles_per_us))

    def _between(self, events: Events, run: Run) -> Launched:
        """Queue a run between two events; time the call on the host."""
        begin, end = events
        begin.record()
        start = time.perf_counter_ns()
        run()
        host_us = (time.perf_counter_ns() - start) / 1e3
        end.record()
        return Launched(events=events, host_us=host_us, starved=bool(begin.query()))

    def launch(self, run: Run, behind_us: float = 0.0) -> Launched:
        """Queue a run between two events, behind a sleep of ``behind_us``."""
        events = self._events()
        self._sleep(behind_us)
        return self._between(events, run)

    def sample(self, run: Run, cold: bool, host_us: float) -> Launched:
        """Queue a run behind a flush (cold) or another run (warm), and both behind a sleep.

        The sleep lasts until the host has queued everything, so that no kernel waits for the host.
        """
        events = self._events()
        lead_us = LEAD * host_us * (1 if cold else 2) + LEAD_US
        self._sleep(lead_us - (self._flush_us if cold else 0.0))
        if cold:
            self._flush_buffer.zero_()
        else:
            run()
        return self._between(events, run)

    def elapsed_us(self, launched: Launched) -> float:
        """Time between the two events of a launch."""
        begin, end = launched.events
        return float(begin.elapsed_time(end)) * 1e3  # ms to us

    def wait(self) -> None:
        """Wait until all queued work is done."""
        torch.cuda.synchronize()

    def broken(self) -> bool:
        """Whether a sticky error has occurred: then even waiting fails."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def kernels(self, runs: Sequence[Run]) -> list[list[tuple[str, float]]]:
        """Kernels by run; empty where profiling fails, and always after two failures in a row."""
        no_kernels: list[list[tuple[str, float]]] = [[] for _ in runs]
        if self._failed_profiles == MAX_FAILED_PROFILES or not runs:
            return no_kernels
        try:
            kernels_of_runs = kernels_by_run(profile(runs, self.wait, self.tiny), len(runs))
            if not any(kernels_of_runs):
                raise RuntimeError(
                    "the profiler recorded no kernel; has this user access to CUPTI?"
                )
        except Exception as exc:  # kernel names are optional: the sweep goes on without
            self._failed_profiles += 1
            log.warning("rows of this chunk have no kernel names: %s", exc)
            return no_kernels
        self._failed_profiles = 0
        return kernels_of_runs

    def conditions(self) -> Reading:
        """Clocks, power and temperature by NVML, and the energy since the driver was loaded."""
        reading, energy_j = self.nvml.read(), self.nvml.energy_j()
        return reading if energy_j is None else {**reading, "energy_j": energy_j}

    def reset(self) -> None:
        """Return unused memory to the driver after a failed allocation, and renew the arena.

        The arena is renewed only where most of it was returned. While tensors live in it torch
        keeps it, and allocating most of the free memory besides would leave none for CUDA itself.
        """
        gc.collect()  # the garbage collector is off during a chunk
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved()
        if reserved_bytes >= self.arena_bytes / 2:
            return
        free_bytes, _ = torch.cuda.mem_get_info()
        try:
            self._reserve(min(int(ARENA_FRAC * free_bytes), self.arena_bytes - reserved_bytes))
        except RuntimeError as exc:  # points then wait for cudaMalloc once each
            log.warning("memory for the arena was not available: %s", exc)
