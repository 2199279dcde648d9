"""A CUDA GPU for sweeps in chunks: memory, events, an L2 flush, a host kept ahead, a profiler.

What the timed window leaves out. CUDA events are created before it. Memory, cuBLAS workspaces and
kernels' code are there from a point's first run on. The device sleeps until the host has queued all
of a sample, so that launches do not count; where the host was too slow all the same, the sample
says so. cuDNN picks its kernels by heuristics (``cudnn.benchmark`` off), as models run by default.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

from microbench.timing.device import Launched, Run
from microbench.timing.kernels import kernels_by_run, profile
from microbench.timing.nvml import Nvml

log = logging.getLogger(__name__)
MEMORY_FRAC = 0.9  # of the GPU's memory torch may take; CUDA modules, CUPTI and NCCL use the rest
ARENA_FRAC = 0.85  # of the memory that is free
FLUSH_PER_L2 = 2.0
SLEEP_CYCLES = 2_000_000  # about a millisecond, to learn how fast the clock of sleep is
LEAD = 1.5  # times what queueing usually takes: SM clocks, which sleep counts in, vary by a third
LEAD_US = 15.0  # and the cost of a flush and two events
MAX_SLEEP_US = 5000.0
WARM_UP_S = 0.5
MAX_FAILED_PROFILES = 2  # in a row


class CudaDevice:
    """One GPU as ``device.Device``; ``l2_bytes`` sets the size of the flush.

    torch's allocator serves every point from one large block taken first, so that no point waits
    for cudaMalloc.
    """

    name = "cuda"

    def __init__(self, l2_bytes: float) -> None:
        import torch  # lazy: the parent and CPU sweeps do without CUDA

        self.torch: Any = torch
        self.nvml = Nvml(str(torch.cuda.get_device_properties(0).uuid))
        self._failed_profiles = 0
        torch.cuda.set_per_process_memory_fraction(MEMORY_FRAC)
        self._flush_buffer = torch.empty(
            int(FLUSH_PER_L2 * l2_bytes), dtype=torch.uint8, device="cuda"
        )
        self._one = torch.ones(1, device="cuda")
        free_bytes, _ = torch.cuda.mem_get_info()
        self.arena_bytes = int(ARENA_FRAC * free_bytes)
        self._take(self.arena_bytes)
        self._cycles_per_us = self._calibrate()
        self._flush_us = self.elapsed_us(self._second(self._flush_buffer.zero_))

    def _take(self, size: int) -> None:
        """One block of so many bytes, handed back to torch's allocator, which keeps it."""
        self.torch.empty(size, dtype=self.torch.uint8, device="cuda")

    def _calibrate(self) -> float:
        """Cycles of sleep in a microsecond, on a GPU that has been busy for a while."""
        torch = self.torch
        x = torch.randn(2048, 2048, device="cuda")
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            torch.mm(x, x)
            torch.cuda.synchronize()
        return SLEEP_CYCLES / self.elapsed_us(self._second(lambda: torch.cuda._sleep(SLEEP_CYCLES)))

    def _second(self, run: Run) -> Launched:
        """The second of two runs, waited for: the first may load code."""
        run()
        launched = self.launch(run)
        self.wait()
        return launched

    def settings(self, dtype: str) -> None:
        """TF32 for products of dtype tf32 only."""
        self.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        self.torch.backends.cudnn.allow_tf32 = dtype == "tf32"

    def held_bytes(self) -> int:
        """Bytes of live tensors."""
        return int(self.torch.cuda.memory_allocated())

    def tiny(self) -> None:
        """Negate one number."""
        self._one.neg_()

    def _events(self) -> tuple[Any, Any]:
        """Two events that exist: CUDA creates an event when it is first recorded."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        return begin, end

    def _sleep(self, us: float) -> None:
        if us > 0:
            self.torch.cuda._sleep(int(min(us, MAX_SLEEP_US) * self._cycles_per_us))

    def _between(self, events: tuple[Any, Any], run: Run) -> Launched:
        begin, end = events
        begin.record()
        start = time.perf_counter_ns()
        run()
        host_us = (time.perf_counter_ns() - start) / 1e3
        end.record()
        return Launched(events=events, host_us=host_us, starved=bool(begin.query()))

    def launch(self, run: Run, behind_us: float = 0.0) -> Launched:
        """Queue a run between two events, behind a sleep where one is asked for."""
        events = self._events()
        self._sleep(behind_us)
        return self._between(events, run)

    def sample(self, run: Run, cold: bool, host_us: float) -> Launched:
        """Queue a run behind a flush or another run, and all behind a sleep.

        The sleep lasts until the host has queued everything, so that no kernel waits for it.
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
        """Time between the two events."""
        begin, end = launched.events
        return float(begin.elapsed_time(end)) * 1e3  # ms to us

    def wait(self) -> None:
        """Until the GPU has caught up."""
        self.torch.cuda.synchronize()

    def broken(self) -> bool:
        """Whether even waiting fails: errors of kernels stick to the process."""
        try:
            self.torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def kernels(self, runs: Sequence[Run]) -> list[list[tuple[str, float]]]:
        """Kernels by run; none where the profiler fails, none ever after two failures in a row."""
        nothing: list[list[tuple[str, float]]] = [[] for _ in runs]
        if self._failed_profiles == MAX_FAILED_PROFILES or not runs:
            return nothing
        try:
            found = kernels_by_run(profile(runs, self.wait, self.tiny), len(runs))
            if not any(found):
                raise RuntimeError("the profiler saw no kernel: may this user use CUPTI?")
        except Exception as exc:  # names of kernels are an extra: no sweep ends for them
            self._failed_profiles += 1
            log.warning("no kernels in this chunk's rows: %s", exc)
            return nothing
        self._failed_profiles = 0
        return found

    def conditions(self) -> dict[str, Any]:
        """NVML's readings, and the energy so far."""
        found, energy_j = self.nvml.read(), self.nvml.energy_j()
        return found if energy_j is None else {**found, "energy_j": energy_j}

    def reset(self) -> None:
        """After a failed allocation: unused segments go back to the driver.

        The arena is taken anew only where most of it was given back: while tensors live in it, it
        stays, and to take most of what is free besides would leave nothing for CUDA itself.
        """
        gc.collect()  # during a chunk collection is off
        self.torch.cuda.empty_cache()
        reserved_bytes = self.torch.cuda.memory_reserved()
        if reserved_bytes >= self.arena_bytes / 2:
            return
        free_bytes, _ = self.torch.cuda.mem_get_info()
        try:
            self._take(min(int(ARENA_FRAC * free_bytes), self.arena_bytes - reserved_bytes))
        except RuntimeError as exc:  # points can do without: each waits for cudaMalloc once
            log.warning("the arena was not taken again: %s", exc)
