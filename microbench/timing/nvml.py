"""Reads an NVIDIA GPU's clocks, throttle reasons, power, temperature and energy by NVML."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from itercast.capture.base.yaml_text import facts_of

REASONS: Mapping[int, str] = facts_of(__file__)["reasons"]
# Not power_cap: GPUs run at their power limit in every long training.
THROTTLED = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


def reasons(bits: int) -> tuple[str, ...]:
    """Names of the throttle reasons in a bit mask of NVML."""
    return tuple(name for bit, name in REASONS.items() if bits & bit)


Reading = dict[str, Any]  # columns of a row, by name


class Nvml:
    """Readings of one GPU, without those that the driver does not support; none without NVML."""

    def __init__(self, uuid: str) -> None:
        """``uuid``: as torch states it, without ``GPU-`` in front."""
        self._handle: Any = None
        try:
            import pynvml  # lazy: machines without NVIDIA lack the library it loads

            self._nvml: Any = pynvml
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception:  # readings are optional: the sweep goes on without
            self._handle = None

    def _query(self, name: str, *args: Any) -> Any:
        """Call an NVML function; None where it is missing or fails."""
        if self._handle is None:
            return None
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        try:
            return function(self._handle, *args) if function else None
        except self._nvml.NVMLError:
            return None

    def index(self) -> int | None:
        """The GPU's number on its host; None without NVML."""
        index = self._query("nvmlDeviceGetIndex")
        return None if index is None else int(index)

    def others(self) -> int:
        """Number of other processes that compute on this GPU now; 0 without NVML."""
        running = self._query("nvmlDeviceGetComputeRunningProcesses") or ()
        return sum(process.pid != os.getpid() for process in running)

    def energy_j(self) -> float | None:
        """Energy in joules used since the driver was loaded; None where it is not supported."""
        millijoules = self._query("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def read(self) -> Reading:
        """Columns of a row: current clocks, power, temperature and throttle reasons."""
        bits = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")
        columns = {
            "sm_clock_hz": _times(self._query("nvmlDeviceGetClockInfo", 1), 1e6),  # MHz
            "memory_clock_hz": _times(self._query("nvmlDeviceGetClockInfo", 2), 1e6),
            "power_w": _times(self._query("nvmlDeviceGetPowerUsage"), 1e-3),  # milliwatts
            "temperature_c": self._query("nvmlDeviceGetTemperature", 0),
            "throttle": None if bits is None else " ".join(reasons(bits)),
        }
        return {name: value for name, value in columns.items() if value is not None}


def driver_version() -> str:
    """Version of the NVIDIA driver; empty without a driver."""
    try:
        import pynvml  # lazy, as above

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # optional, as above
        return ""


def _times(value: Any, factor: float) -> float | None:
    return None if value is None else value * factor


def is_throttled(reading: Reading) -> bool:
    """Whether a reading has a throttle reason of heat or power supply."""
    return bool(THROTTLED & set(str(reading.get("throttle", "")).split()))


def combined(readings: Sequence[Reading]) -> Reading:
    """Combine readings: medians, the lowest SM clock, all throttle reasons."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    columns: Reading = {}
    for name in names:
        values = [reading[name] for reading in readings if name in reading]
        if name == "throttle":
            columns[name] = " ".join(sorted({word for text in values for word in text.split()}))
        else:
            columns[name] = statistics.median(values)
        if name == "sm_clock_hz":
            columns["sm_clock_hz_min"] = min(values)
    return columns
