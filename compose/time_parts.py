"""Splits a forecast iteration into parts that add up to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from itercast.compose.forecast import Forecast
from itercast.microbench.ops import families

COMPUTE, COMMUNICATION, IDLE = "compute", "communication", "idle"
IDLE_NAMES: Mapping[str, str] = {
    "host": "GPU waits for the host",
    "bubble": "pipeline bubble",
    "waiting": "waits for other stages",
    "input": "waits for its batches",
}
NAMES: Mapping[str, str] = {  # of shares and families, where others are said as they are
    "products": "products (GEMM, conv, attention)",
    "memory": "other ops (memory)",
    "unmodelled": "ops without a trained model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of the slowest rank's iteration; ``kind`` is compute, communication or idle."""

    name: str
    kind: str
    time_us: float
    iteration_frac: float


def time_parts(forecast: Forecast) -> list[TimePart]:
    """Splits the iteration into parts, largest first; their times add up to ``iteration_us``.

    Parts are compute by op family, communication that no compute hides, and idle time by its cause.
    The time by which overlapping communication slows compute down is a part of its own.
    """
    ops_us = {name: us for name, us in forecast.by_family_us.items() if name != "collective"}
    total_us = sum(ops_us.values())
    scale = min(1.0, forecast.compute_us / total_us) if total_us else 0.0
    slowed_us = max(0.0, forecast.compute_us - total_us)
    times = [(name, COMPUTE, us * scale) for name, us in ops_us.items()]
    times += [
        ("slowed by messages beside compute", COMMUNICATION, slowed_us),
        ("messages not hidden", COMMUNICATION, forecast.exposed_comm_us),
        *((IDLE_NAMES[name], IDLE, us) for name, us in forecast.idle_by_us.items()),
    ]
    negligible_us = 1e-9 * forecast.iteration_us
    parts = [
        TimePart(name=name, kind=kind, time_us=us, iteration_frac=us / forecast.iteration_us)
        for name, kind, us in times
        if us > negligible_us
    ]
    return sorted(parts, key=lambda part: -part.time_us)


def limits(forecast: Forecast) -> dict[str, float]:
    """Shares of the iteration by what bounds it, largest first; they add up to 1.

    "products" (the rate of tensor cores), "memory" (all other ops), "messages" (not hidden, and by
    how much they slow compute), and idle times by cause.
    """
    shares: dict[str, float] = defaultdict(float)
    for part in time_parts(forecast):
        family = families().get(part.name)
        work = "products" if family is not None and family.matmul else "memory"
        bound_of_kind = {COMMUNICATION: "messages", IDLE: part.name, COMPUTE: work}
        shares[bound_of_kind[part.kind]] += part.iteration_frac
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def limits_in_words(forecast: Forecast) -> str:
    """``limits`` of 1 % or more in one line: "products (GEMM, ...) 67 %, messages 7 %"."""
    shares = ((NAMES.get(name, name), 100 * frac) for name, frac in limits(forecast).items())
    return ", ".join(f"{name} {percent:.0f} %" for name, percent in shares if percent >= 1)
