"""What the host costs: events without a kernel and kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from compose.memo import remembered
from compose.priced import PricedOp, Pricer
from microbench.hardware.spec import Gpu

# Assumptions where family 'host' has no model, right within a factor of two.
ASSUMED_US = {
    "module_call": 3.0,
    "view_op": 1.0,
    "autograd_node": 2.0,
    "accumulate_grad": 2.0,
    "zero_grad": 1.0,
    "backward": 20.0,
    "adamw_step": 100.0,
    "sgd_step": 50.0,
    "launch": 5.0,
}
PER_STEP = ("adamw_step", "sgd_step")  # one event; its count is that of the parameters


def host_cost(counts: Mapping[str, int], pricer: Pricer, gpu: Gpu, threads: int) -> PricedOp:
    """The host's time in a step as one op: counted events times the price of one.

    The model counts on a CPU, where it was measured on the machine that is asked about, and
    elsewhere only inside its envelope; ``in_envelope`` is false where a price is assumed.
    """
    unknown = sorted(set(counts) - set(ASSUMED_US))
    if unknown:
        raise ValueError(f"unknown host events {unknown}; known: {sorted(ASSUMED_US)}")
    events = [name for name in counts if counts[name]]
    learned: list[dict[str, float]] = []
    if "host" in pricer.models and events:
        sizes = tuple(counts[e] if e in PER_STEP else 1 for e in events)
        learned = _learned(pricer, gpu, threads, tuple(events), sizes)
    us = low_us = high_us = 0.0
    inside = True
    for i, event in enumerate(events):
        if learned and (gpu.kind == "cpu" or learned[i]["in_envelope"]):
            row = learned[i]
            one = (row["predicted_us"], row["predicted_us_p10"], row["predicted_us_p90"])
            inside = inside and bool(row["in_envelope"])
        else:
            guess = ASSUMED_US[event]
            one, inside = (guess, guess / 2, guess * 2), False
        times = 1 if event in PER_STEP else counts[event]
        us, low_us, high_us = us + times * one[0], low_us + times * one[1], high_us + times * one[2]
    return PricedOp(
        op="host",
        family="host",
        phase="host",
        duration_us=us,
        low_us=low_us,
        high_us=high_us,
        flops=0.0,
        in_envelope=inside,
    )


@remembered
def _learned(
    pricer: Pricer, gpu: Gpu, threads: int, events: tuple[str, ...], tensors: tuple[int, ...]
) -> list[dict[str, float]]:
    """Price rows of the events."""
    facts: dict[str, Any] = {
        "trial": 0,
        "dtype": "fp32",
        "gpu": gpu.name,
        "threads": threads,
        "cache": "warm",
    }
    rows = pd.DataFrame({"op": events, "tensors": tensors}).assign(**facts)
    found: list[dict[str, float]] = pricer.price("host", rows, {gpu.name: gpu}).to_dict("records")  # type: ignore[assignment]
    return found
