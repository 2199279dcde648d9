"""What the driver says of an NVIDIA GPU: clocks, throttle reasons, power, temperature, energy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
# A GPU at its power limit runs as it does in every long training; one too hot does not.
THROTTLED = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


def reasons(bits: int) -> tuple[str, ...]:
    """Names of the throttle reasons in NVML's bit mask."""
    return tuple(name for bit, name in REASONS.items() if bits & bit)


class Nvml:
    """Readings of one GPU; what the driver does not tell is left out, all of it without NVML."""

    def __init__(self, uuid: str) -> None:
        """``uuid`` as torch states it, without the leading ``GPU-``."""
        self._handle: Any = None
        try:
            import pynvml  # lazy: machines without NVIDIA lack the library it loads

            self._nvml: Any = pynvml
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception:  # NVML is an extra: no reading is worth a sweep
            self._handle = None

    def _ask(self, name: str, *args: Any) -> Any:
        """A reading, or None."""
        if self._handle is None:
            return None
        ask: Callable[..., Any] | None = getattr(self._nvml, name, None)
        try:
            return ask(self._handle, *args) if ask else None
        except self._nvml.NVMLError:
            return None

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def read(self) -> dict[str, Any]:
        """Columns of a row: the GPU as it is now."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        found = {
            "sm_clock_hz": _times(self._ask("nvmlDeviceGetClockInfo", 1), 1e6),  # MHz
            "memory_clock_hz": _times(self._ask("nvmlDeviceGetClockInfo", 2), 1e6),
            "power_w": _times(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),  # milliwatts
            "temperature_c": self._ask("nvmlDeviceGetTemperature", 0),
            "throttle": None if bits is None else " ".join(reasons(bits)),
        }
        return {name: value for name, value in found.items() if value is not None}


def driver_version() -> str:
    """Of the NVIDIA driver; empty without one."""
    try:
        import pynvml  # lazy, as above

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # as above: an extra
        return ""


def _times(value: Any, factor: float) -> float | None:
    return None if value is None else value * factor


def is_throttled(reading: dict[str, Any]) -> bool:
    """Whether a reading says that the GPU was slowed down by heat or by its power supply."""
    return bool(THROTTLED & set(str(reading.get("throttle", "")).split()))


def combined(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several readings as one: medians, the least SM clock, every throttle reason that was seen."""
    names = dict.fromkeys(name for reading in readings for name in reading)
    found: dict[str, Any] = {}
    for name in names:
        values = [reading[name] for reading in readings if name in reading]
        if name == "throttle":
            found[name] = " ".join(sorted({word for text in values for word in text.split()}))
        else:
            found[name] = statistics.median(values)
        if name == "sm_clock_hz":
            found["sm_clock_hz_min"] = min(values)
    return found
