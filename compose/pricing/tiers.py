"""Bytes between a GPU and its tiers of memory: the host's (uvm), or an SSD of its own."""

from __future__ import annotations

from collections.abc import Mapping

from itercast.capture.base.assumptions import assumed
from itercast.compose.parallel.placement import SSD, UVM
from itercast.microbench.hardware.spec import Gpu

RATES = {UVM: "tiers.pcie_frac", SSD: "tiers.drive"}  # assumptions that their times rest on
FETCH, EVICT = "fetch", "evict"
PCIE_FRAC: float = assumed(__file__, "pcie_frac")
DRIVE: Mapping[str, float] = assumed(__file__, "drive")


def tier_us(tier: str, kind: str, nbytes: float, gpu: Gpu) -> float:
    """Time in us to stream bytes between a GPU and host memory, or a drive of its own."""
    if not gpu.pcie_bytes_per_s:
        raise ValueError(f"gpu {gpu.name!r}: no pcie_bytes_per_s, which tables in {tier} need")
    rate = PCIE_FRAC * gpu.pcie_bytes_per_s
    if tier == SSD:
        rate = min(rate, DRIVE["read_bytes_per_s" if kind == FETCH else "write_bytes_per_s"])
    return nbytes / rate * 1e6
