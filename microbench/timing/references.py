"""Times the references of every chunk: event overhead, gap between kernels, a fixed product."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from itercast.microbench.timing.cuda_device import CudaDevice, Launched, Run

SAMPLES = 5
MAX_SAMPLES = 15  # where some starve
FIRST_HOST_US = 10.0  # of a run that should take the host no time, after its first starved sample
IN_A_ROW = 50  # kernels


def reference_times(device: CudaDevice, anchor: Run) -> dict[str, float]:
    """Columns that all rows of a chunk share, in us.

    - ``empty_us``: time between two adjacent events; it is subtracted from all device times.
    - ``drift_us``: time of the anchor, the same product in every chunk; shows the GPU's speed.
    - ``tiny_launch_us``: host time to launch a tiny kernel; shows the host's speed, and whether an
      ended profiler session still slows launches.
    - ``gap_us``: time between two kernels of a sequence,
      (time of 50 tiny kernels - 50 * time of one) / 49. Kernels that run back to back take the sum
      of their times plus one gap per boundary. Negative where kernels overlap.
    """
    launches = []
    for _ in range(SAMPLES):
        device.wait()
        launches.append(device.launch(device.tiny).host_us)
    tiny_launch_us = min(launches)

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            device.tiny()

    empty_us = _median_us(device, _empty, 0.0)
    one_us = _median_us(device, device.tiny, tiny_launch_us) - empty_us
    row_us = _median_us(device, in_a_row, IN_A_ROW * tiny_launch_us) - empty_us
    return {
        "empty_us": empty_us,
        "drift_us": _median_us(device, anchor, 2 * tiny_launch_us) - empty_us,
        "tiny_launch_us": tiny_launch_us,
        "gap_us": (row_us - IN_A_ROW * one_us) / (IN_A_ROW - 1),
    }


def _median_us(device: CudaDevice, run: Run, host_us: float) -> float:
    """Median of warm samples. After each that starved, the sleep before samples grows."""
    queued: list[Launched] = []
    while len(queued) < MAX_SAMPLES and sum(not s.starved for s in queued) < SAMPLES:
        queued.append(device.sample(run, False, host_us))
        if queued[-1].starved:
            host_us = max(2 * host_us, FIRST_HOST_US)
    device.wait()
    return statistics.median(device.elapsed_us(sample) for sample in unstarved(queued))


def unstarved(queued: Sequence[Launched]) -> list[Launched]:
    """Samples during which the device did not wait for the host; all samples if it always did."""
    return [sample for sample in queued if not sample.starved] or list(queued)


def _empty() -> None:
    """An empty run, to time the events alone."""
