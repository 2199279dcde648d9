"""What is timed once in every chunk: events, the gap between kernels, and a product for drift."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from microbench.timing.device import Device, Launched, Run

SAMPLES = 5
IN_A_ROW = 50  # kernels


def reference_times(device: Device, anchor: Run) -> dict[str, float]:
    """Columns that all rows of a chunk share, in us.

    ``empty_us``: between two events with nothing in between; every device time has it taken off.
    ``drift_us``: the anchor, the same run in every chunk: shows whether the GPU changes speed.
    ``tiny_launch_us``: host time to launch a tiny kernel: shows whether the host changes speed, or
    whether a profiler that has ended still slows launches down.
    ``gap_us``: what a kernel in a row of 50 takes more than it does alone; device times of kernels
    that run back to back add up with this once for each boundary. Negative where the start of a
    kernel overlaps with the end of the one before.
    """
    launches = []
    for _ in range(SAMPLES):
        device.wait()
        launches.append(device.launch(device.tiny).host_us)
    tiny_launch_us = min(launches)

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            device.tiny()

    empty_us = _median_us(device, _nothing, 0.0)
    one_us = _median_us(device, device.tiny, tiny_launch_us) - empty_us
    row_us = _median_us(device, in_a_row, IN_A_ROW * tiny_launch_us) - empty_us
    return {
        "empty_us": empty_us,
        "drift_us": _median_us(device, anchor, 2 * tiny_launch_us) - empty_us,
        "tiny_launch_us": tiny_launch_us,
        "gap_us": (row_us - IN_A_ROW * one_us) / (IN_A_ROW - 1),
    }


def _median_us(device: Device, run: Run, host_us: float) -> float:
    """Median of warm samples, of those for which the host was fast enough if there are any."""
    queued = [device.sample(run, False, host_us) for _ in range(SAMPLES)]
    device.wait()
    return statistics.median(device.elapsed_us(sample) for sample in unstarved(queued))


def unstarved(queued: Sequence[Launched]) -> list[Launched]:
    """The samples during which the device did not wait for the host; all where it always did."""
    return [sample for sample in queued if not sample.starved] or list(queued)


def _nothing() -> None:
    """What is timed to know what events cost."""
