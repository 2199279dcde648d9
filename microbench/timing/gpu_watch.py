"""Records a GPU's clocks and power while it runs training steps."""

from __future__ import annotations

import time

from itercast.microbench.timing.nvml import Nvml, Reading, combined

READ_EVERY_S = 0.1
MIN_ENERGY_S = 0.3  # the driver updates its energy counter every few tens of milliseconds


class GpuWatch:
    """Collects readings between ``begin`` and ``facts``; one is due every ``READ_EVERY_S``."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self.begin()

    def begin(self) -> None:
        """Drop earlier readings and restart the energy counter."""
        self.readings: list[Reading] = []
        self._begin_s, self._begin_j = time.monotonic(), self.nvml.energy_j()
        self._read_s = 0.0

    def due(self) -> bool:
        """Whether it is time for the next reading."""
        return time.monotonic() - self._read_s >= READ_EVERY_S

    def read(self) -> None:
        """Take one reading; call it while the GPU is busy."""
        self.readings.append(self.nvml.read())
        self._read_s = time.monotonic()

    def facts(self) -> Reading:
        """Columns of a row; call it right after the last step.

        Readings ``combined``, and the mean power, energy / time, where the time suffices.
        """
        columns = combined(self.readings)
        passed_s, end_j = time.monotonic() - self._begin_s, self.nvml.energy_j()
        if end_j is not None and self._begin_j is not None and passed_s >= MIN_ENERGY_S:
            columns["power_w"] = (end_j - self._begin_j) / passed_s
        return columns
