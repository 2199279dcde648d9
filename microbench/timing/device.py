"""What a sweep in chunks asks of a device that queues work and runs behind the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that was queued between two events.

    ``host_us`` is how long the call that queued it took. ``starved``: the device was past the first
    event when the host had queued the second, so that it may have waited for the host in between.
    """

    events: Any
    host_us: float
    starved: bool


class Device(Protocol):
    """A device that queues work. ``CudaDevice`` is one; tests have a clockwork one."""

    name: str
    arena_bytes: int

    def settings(self, dtype: str) -> None:
        """Switch on what ops of this dtype need: TF32 or not."""

    def held_bytes(self) -> int:
        """Bytes of everything that is allocated."""

    def tiny(self) -> object:
        """Launch one kernel that is as short as kernels get."""

    def launch(self, run: Run, behind_us: float = 0.0) -> Launched:
        """Queue a run, behind a sleep of the device where ``behind_us`` is given."""

    def sample(self, run: Run, cold: bool, host_us: float) -> Launched:
        """Queue a run after a flush (cold) or after itself (warm), all of it behind a sleep.

        ``host_us`` is what queueing the run takes; the sleep lasts longer than that.
        """

    def elapsed_us(self, launched: Launched) -> float:
        """Time between the two events, once the device has caught up."""

    def wait(self) -> None:
        """Wait until the device has caught up."""

    def broken(self) -> bool:
        """Whether the device answers no more."""

    def kernels(self, runs: Sequence[Run]) -> list[list[tuple[str, float]]]:
        """Names and durations in us of the kernels each run launches, under a profiler."""

    def conditions(self) -> dict[str, Any]:
        """Clocks, power and temperature as they are now."""

    def reset(self) -> None:
        """After an allocation failed: give back to the driver what is free."""
