"""Prices of GPUs, from a user's file."""

from __future__ import annotations

from pathlib import Path

from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.yaml_text import read_mapping, typed


def read_prices(path: Path) -> dict[str, float]:
    """USD per hour of one GPU by name, from a YAML file of names and prices."""
    prices = dict[str, float]()
    for name, price in read_mapping(path, "file of prices (GPU: USD per hour of one)").items():
        gpu = gpu_named(str(name)) or str(name)
        if gpu in prices:
            raise ValueError(f"prices {str(path)!r}: {gpu!r} has two prices, state one")
        prices[gpu] = typed(float, price, f"prices {str(path)!r}: the price of {name!r}")
    return prices
