"""What the host costs: events without a kernel and kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from compose.pricer import Pricer, price_or_none
from microbench.hardware.spec import Gpu

ASSUMED_US = {"module_call": 4.0, "view_op": 1.5, "autograd_node": 2.0, "launch": 5.0}
ASSUMED_SPREAD = 2.0  # assumption: a guessed host cost is right within a factor of two


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Host time of a step in us; ``assumed_us`` is the part of it that no model priced."""

    duration_us: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    assumed_us: float = 0.0


def host_cost(counts: Mapping[str, int], pricer: Pricer, gpu: Gpu, threads: int) -> HostCost:
    """Counted events times the price of one, from family 'host', else from ``ASSUMED_US``.

    The model counts on a CPU, where it was measured on the machine that is asked about, and
    elsewhere only inside its envelope.
    """
    unknown = sorted(set(counts) - set(ASSUMED_US))
    if unknown:
        raise ValueError(f"unknown host events {unknown}; known: {sorted(ASSUMED_US)}")
    events = [name for name in counts if counts[name]]
    if not events:
        return HostCost()
    facts = {"trial": 0, "dtype": "fp32", "gpu": gpu.name, "threads": threads, "cache": "warm"}
    table = price_or_none(pricer, "host", pd.DataFrame({"op": e, **facts} for e in events), gpu)
    total = low = high = assumed = 0.0
    columns = ["predicted_us", "predicted_us_p10", "predicted_us_p90"]
    for i, event in enumerate(events):
        us = ASSUMED_US[event]
        prices = (us, us / ASSUMED_SPREAD, us * ASSUMED_SPREAD)
        row = None if table is None else table.iloc[i]
        if row is not None and (row["in_envelope"] or gpu.kind == "cpu"):
            us, p10, p90 = (float(row[c]) for c in columns)
            prices = (us, p10, p90)
        else:
            assumed += counts[event] * us
        total += counts[event] * prices[0]
        low += counts[event] * prices[1]
        high += counts[event] * prices[2]
    return HostCost(duration_us=total, p10=low, p90=high, assumed_us=assumed)
