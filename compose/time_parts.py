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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of the slowest rank's iteration; ``kind`` is compute, communication or idle."""

    name: str
    kind: str
    time_us: float
    iteration_frac: float


def time_parts(found: Forecast) -> list[TimePart]:
    """Splits the iteration into parts, largest first; their times add up to ``iteration_us``.

    Parts are compute by op family, communication that no compute hides, and idle time by its cause.
    The time by which overlapping communication slows compute down is a part of its own.
    """
    ops = {name: us for name, us in found.by_family_us.items() if name != "collective"}
    total_us = sum(ops.values())
    scale = min(1.0, found.compute_us / total_us) if total_us else 0.0
    slowed_us = max(0.0, found.compute_us - total_us)
    times = [(name, COMPUTE, us * scale) for name, us in ops.items()]
    times += [
        ("slowed by messages beside compute", COMPUTE, slowed_us),
        ("messages not hidden", COMMUNICATION, found.exposed_comm_us),
        *((IDLE_NAMES[name], IDLE, us) for name, us in found.idle_by_us.items()),
    ]
    least_us = 1e-9 * found.iteration_us
    parts = [
        TimePart(name=n, kind=k, time_us=us, iteration_frac=us / found.iteration_us)
        for n, k, us in times
        if us > least_us
    ]
    return sorted(parts, key=lambda part: -part.time_us)


def limits(found: Forecast) -> dict[str, float]:
    """Shares of the iteration by what it spends them on, largest first; they add up to 1.

    Products run at the rate of tensor cores; the other ops mostly at that of memory.
    """
    shares: dict[str, float] = defaultdict(float)
    for part in time_parts(found):
        family = families().get(part.name)
        work = "products" if family is not None and family.matmul else "memory"
        named = {COMMUNICATION: "messages", IDLE: part.name, COMPUTE: work}
        shares[named[part.kind]] += part.iteration_frac
    return dict(sorted(shares.items(), key=lambda share: -share[1]))
