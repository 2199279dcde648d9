"""The machine that a bundle's rows were measured on: versions and readings, to notice changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from itercast.capture.base.slow_imports import pd
from itercast.microbench.store import read_versions

READINGS = ("drift_us", "sm_clock_hz", "memory_clock_hz")  # columns of GPU rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU or CPU: versions of its software by name, and medians of READINGS over its rows."""

    versions: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)


def machines_of(roots: Sequence[Path], tables: Mapping[str, pd.DataFrame]) -> dict[str, Machine]:
    """The machines of rows that itercast measured, by name of the GPU or CPU."""
    return {
        gpu: Machine(versions=versions, readings=readings(tables.values(), gpu))
        for gpu, versions in read_versions(roots).items()
    }


def readings(tables: Collection[pd.DataFrame], gpu: str) -> dict[str, float]:
    """Medians of READINGS over all rows of a GPU, as far as there are any."""
    medians = {}
    for name in READINGS:
        parts = [t.loc[t["gpu"] == gpu, name].dropna() for t in tables if name in t]
        values = pd.concat(parts) if parts else pd.Series(dtype=float)
        if len(values):
            medians[name] = float(values.median())
    return medians
