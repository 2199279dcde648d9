"""Splits a forecast iteration into kernels, host, communication, synchronisation and the unsure."""

from __future__ import annotations

from itercast.compose.forecast import Forecast
from itercast.compose.pricing.priced_op import UNMODELLED

PARTS = ("kernels", "host", "communication", "synchronisation", "assumed", "uncovered")
LANE_OF_ASSUMPTION = {  # by the module that states it; ops of the compute lane otherwise
    "host": "host",
    "alpha_beta": "communication",
    "collectives": "communication",
    "rank_program": "communication",
}


def parts_us(found: Forecast) -> dict[str, float]:
    """Times in us by PARTS, which add up to the iteration of the slowest rank.

    communication: messages that no compute hides; synchronisation: pipeline bubble and waiting for
    slower stages; host: gaps in which a GPU waits for it, on a CPU its share of the compute lane;
    uncovered: ops without a learned model; assumed: what else rests on assumed numbers, taken out
    of the part it belongs to.
    """
    ops_us = {name: us for name, us in found.by_family_us.items() if name != "collective"}
    scale = found.compute_us / total if (total := sum(ops_us.values())) else 0.0
    uncovered_us, host_us = (scale * ops_us.get(name, 0.0) for name in (UNMODELLED, "host"))
    idle_us = found.idle_by_us
    parts = {
        "kernels": found.compute_us - uncovered_us - host_us,
        "host": host_us + idle_us.get("host", 0.0),
        "communication": found.exposed_comm_us,
        "synchronisation": idle_us.get("bubble", 0.0) + idle_us.get("waiting", 0.0),
        "assumed": 0.0,
        "uncovered": uncovered_us,
    }
    left_us = uncovered_us  # of an uncovered op all is assumed: it counts once
    for name, us in found.assumed_by_us.items():
        lane = LANE_OF_ASSUMPTION.get(name.partition(".")[0], "kernels")
        counted = min(us, left_us) if lane == "kernels" else 0.0
        left_us -= counted
        moved = min(us - counted, parts[lane])
        parts[lane] -= moved
        parts["assumed"] += moved
    return parts
