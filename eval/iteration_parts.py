"""Splits a forecast iteration into kernels, host, communication, waiting, and what is unsure."""

from __future__ import annotations

from itercast.compose.forecast import Forecast
from itercast.compose.pricing.priced_op import UNMODELLED

PARTS = ("kernels", "host", "communication", "synchronisation", "assumed", "uncovered")
PART_OF_ASSUMPTION = {  # by the module that states the assumed number; kernels otherwise
    "host": "host",
    "alpha_beta": "communication",
    "collectives": "communication",
    "rank_program": "communication",
}


def parts_us(forecast: Forecast) -> dict[str, float]:
    """Times in us by PARTS, which add up to the iteration of the slowest rank.

    communication: messages that no compute hides; synchronisation: pipeline bubble and waiting for
    slower stages; host: gaps in which a GPU waits for it or for a batch of its loader, on a CPU its
    share of the compute lane;
    uncovered: ops without a learned model; assumed: what else rests on assumed numbers, taken out
    of the part it belongs to.
    """
    ops_us = {name: us for name, us in forecast.by_family_us.items() if name != "collective"}
    all_ops_us = sum(ops_us.values())
    scale = forecast.compute_us / all_ops_us if all_ops_us else 0.0
    uncovered_us, host_us = (scale * ops_us.get(name, 0.0) for name in (UNMODELLED, "host"))
    idle_us = forecast.idle_by_us
    parts = {
        "kernels": forecast.compute_us - uncovered_us - host_us,
        "host": host_us + idle_us.get("host", 0.0) + idle_us.get("input", 0.0),
        "communication": forecast.exposed_comm_us,
        "synchronisation": idle_us.get("bubble", 0.0) + idle_us.get("waiting", 0.0),
        "assumed": 0.0,
        "uncovered": uncovered_us,
    }
    # All of an uncovered op's time rests on assumed numbers, too; it is not to count twice.
    not_yet_met_us = uncovered_us
    for name, us in forecast.assumed_by_us.items():
        part = PART_OF_ASSUMPTION.get(name.partition(".")[0], "kernels")
        already_uncovered_us = min(us, not_yet_met_us) if part == "kernels" else 0.0
        not_yet_met_us -= already_uncovered_us
        moved_us = min(us - already_uncovered_us, parts[part])
        parts[part] -= moved_us
        parts["assumed"] += moved_us
    return parts
