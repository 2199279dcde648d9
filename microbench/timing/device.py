"""Device: what a sweep in chunks needs of a device that runs asynchronously to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from itercast.microbench.timing.nvml import Reading

Run = Callable[[], object]
Events = tuple[Any, Any]  # before a run and after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that was queued between two events.

    ``host_us``: host time of the call that queued it. ``starved``: the device had passed the first
    event before the host queued the second one, so it may have waited for the host in between.
    """

    events: Events
    host_us: float
    starved: bool


class Device(Protocol):
    """A device with a queue: ``CudaDevice``, or a simulated one in tests."""

    name: str
    arena_bytes: int

    def settings(self, dtype: str) -> None:
        """Set TF32 on or off as ops of this dtype need it."""

    def allocated_bytes(self) -> int:
        """Bytes of all live tensors."""

    def tiny(self) -> object:
        """Launch one of the shortest possible kernels."""

    def launch(self, run: Run, behind_us: float = 0.0) -> Launched:
        """Queue a run between two events, behind a device sleep of ``behind_us``."""

    def sample(self, run: Run, cold: bool, host_us: float) -> Launched:
        """Queue a run after a cache flush (cold) or after itself (warm), both behind a sleep.

        The sleep is longer than ``host_us``, the host time that queueing the run takes.
        """

    def elapsed_us(self, launched: Launched) -> float:
        """Time between the two events, once the work is done."""

    def wait(self) -> None:
        """Wait until all queued work is done."""

    def broken(self) -> bool:
        """Whether a sticky error has made the device unusable for this process."""

    def kernels(self, runs: Sequence[Run]) -> list[list[tuple[str, float]]]:
        """Names and durations in us of the kernels that each run launches, by a profiler."""

    def conditions(self) -> Reading:
        """Current clocks, power and temperature, as columns of a row."""

    def reset(self) -> None:
        """Return unused memory to the driver, after a failed allocation."""
