"""A CUDA GPU for sweeps in chunks: an arena, events, an L2 flush, a host kept ahead, a profiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from microbench.chunks import Run
from microbench.kernels import kernels_by_run, profile
from microbench.nvml import Nvml

log = logging.getLogger(__name__)
ARENA_FRAC = 0.85  # of the memory that is free
FLUSH_PER_L2 = 2.0
SLEEP_CYCLES = 2_000_000  # about a millisecond, to learn how fast the clock of sleep is
LEAD = 1.5  # times its usual launch cost
LEAD_US = 15.0  # and the cost of a flush and two events
MAX_SLEEP_US = 5000.0
WARM_UP_S = 0.5


class CudaDevice:
    """One GPU as ``chunks.Device``; ``l2_bytes`` sets the size of the flush.

    Memory stays with torch's allocator, which serves every point from one large block taken first.
    """

    name = "cuda"

    def __init__(self, l2_bytes: float) -> None:
        import torch  # lazy: the parent and CPU sweeps do without CUDA

        self.torch: Any = torch
        self.nvml = Nvml(str(torch.cuda.get_device_properties(0).uuid))
        self.profiles = True
        self._flush_buffer = torch.empty(
            int(FLUSH_PER_L2 * l2_bytes), dtype=torch.uint8, device="cuda"
        )
        self.arena_bytes = self._take_arena()
        self._cycles_per_us = self._calibrate()
        self._flush_us = self.elapsed_us(self._between(self._flush_buffer.zero_))

    def _take_arena(self) -> int:
        """One block of most of the free memory, handed back to the allocator and kept by it."""
        free_bytes, _ = self.torch.cuda.mem_get_info()
        wanted = int(ARENA_FRAC * free_bytes)
        self.torch.empty(wanted, dtype=self.torch.uint8, device="cuda")
        return wanted

    def _calibrate(self) -> float:
        """Cycles of sleep in a microsecond, on a GPU that has been busy for a while."""
        torch = self.torch
        x = torch.randn(2048, 2048, device="cuda")
        end = time.monotonic() + WARM_UP_S
        while time.monotonic() < end:
            torch.mm(x, x)
            torch.cuda.synchronize()
        return SLEEP_CYCLES / self.elapsed_us(
            self._between(lambda: torch.cuda._sleep(SLEEP_CYCLES))
        )

    def _between(self, run: Run) -> tuple[Any, Any]:
        """A run between two events, waited for."""
        run()
        _, marks = self.launch(run)
        self.wait()
        return marks

    def _event(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def settings(self, dtype: str) -> None:
        """TF32 for products of dtype tf32 only."""
        self.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        self.torch.backends.cudnn.allow_tf32 = dtype == "tf32"

    def held_bytes(self) -> int:
        """Bytes of live tensors."""
        return int(self.torch.cuda.memory_allocated())

    def launch(self, run: Run) -> tuple[float, tuple[Any, Any]]:
        """Queue a run between two events."""
        begin, end = self._event(), self._event()
        begin.record()
        start = time.perf_counter_ns()
        run()
        launch_us = (time.perf_counter_ns() - start) / 1e3
        end.record()
        return launch_us, (begin, end)

    def sample(self, run: Run, cold: bool, launch_us: float) -> tuple[Any, Any]:
        """Queue a run behind a flush or another run, and all behind a sleep.

        The sleep lasts until the host has queued everything, so that no kernel waits for it.
        """
        lead_us = LEAD * launch_us * (1 if cold else 2) + LEAD_US
        sleep_us = min(lead_us - (self._flush_us if cold else 0.0), MAX_SLEEP_US)
        if sleep_us > 0:
            self.torch.cuda._sleep(int(sleep_us * self._cycles_per_us))
        if cold:
            self._flush_buffer.zero_()
        else:
            run()
        return self.launch(run)[1]

    def elapsed_us(self, launched: tuple[Any, Any]) -> float:
        """Time between the two events."""
        begin, end = launched
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
        """Kernels by run; none of any where the profiler does not work."""
        if self.profiles and runs:
            try:
                return kernels_by_run(profile(runs, self.wait), len(runs))
            except Exception as exc:  # names of kernels are an extra: no sweep ends for them
                self.profiles = False
                log.warning("no kernels in rows from now on: %s", exc)
        return [[] for _ in runs]

    def conditions(self) -> dict[str, Any]:
        """NVML's readings, and the energy so far."""
        found, energy_j = self.nvml.read(), self.nvml.energy_j()
        return found if energy_j is None else {**found, "energy_j": energy_j}

    def reset(self) -> None:
        """After a failed allocation the allocator may have given the block away: take it anew."""
        self.torch.cuda.empty_cache()
        self._take_arena()
