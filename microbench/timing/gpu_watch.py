"""A GPU's clocks and power while it runs steps, for the row of an iteration."""

from __future__ import annotations

import statistics
import time
from typing import Any

from microbench.timing.nvml import Nvml

LOOK_EVERY_S = 0.1
LEAST_ENERGY_S = 0.3  # the driver renews its energy counter every few tens of milliseconds


class GpuWatch:
    """Readings between ``begin`` and ``facts``; one is due every ``LOOK_EVERY_S``."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self.begin()

    def begin(self) -> None:
        """Forget earlier readings: steps are timed from now on."""
        self.readings: list[dict[str, Any]] = []
        self._begin_s, self._begin_j = time.monotonic(), self.nvml.energy_j()
        self._looked_s = 0.0

    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked_s >= LOOK_EVERY_S

    def look(self) -> None:
        """One reading; to be called while the GPU is at work."""
        self.readings.append(self.nvml.read())
        self._looked_s = time.monotonic()

    def facts(self) -> dict[str, Any]:
        """Columns of a row; to be called right after the last step.

        Medians of clocks and the least clock of the SMs, all throttle reasons seen, the mean power:
        energy over time where enough of it passed, else the mean of the readings.
        """
        found: dict[str, Any] = {}
        clocks_hz = self._all("sm_clock_hz")
        for name in ("sm_clock_hz", "memory_clock_hz", "temperature_c"):
            if values := self._all(name):
                found[name] = statistics.median(values)
        if clocks_hz:
            found["sm_clock_hz_min"] = min(clocks_hz)
        if (power_w := self._power_w()) is not None:
            found["power_w"] = power_w
        if reasons := self._all("throttle"):
            found["throttle"] = " ".join(sorted({word for one in reasons for word in one.split()}))
        return found

    def _all(self, name: str) -> list[Any]:
        return [reading[name] for reading in self.readings if name in reading]

    def _power_w(self) -> float | None:
        passed_s, end_j = time.monotonic() - self._begin_s, self.nvml.energy_j()
        if end_j is not None and self._begin_j is not None and passed_s >= LEAST_ENERGY_S:
            return (end_j - self._begin_j) / passed_s
        values = self._all("power_w")
        return statistics.fmean(values) if values else None
