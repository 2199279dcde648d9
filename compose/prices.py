"""What steps cost, from a file of prices: USD per hour of one GPU, by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from itercast.compose.forecast import Forecast
from itercast.microbench.hardware.names import gpu_named, read_prices

SECONDS_PER_HOUR = 3600
BILLION, MILLION = 1e9, 1e6


def prices_of(path: Path, gpus: Sequence[str]) -> dict[str, float]:
    """USD per hour of one GPU, for each of ``gpus``, from a file of prices."""
    prices = read_prices(path)
    for gpu in gpus:
        if gpu not in prices:
            names = ", ".join(sorted(prices)) or "none"
            raise ValueError(f"prices {str(path)!r}: no price of {gpu!r}; it has {names}")
    return {gpu: prices[gpu] for gpu in gpus}


def bill(forecast: Forecast, path: Path) -> dict[str, float]:
    """USD of a step, of a million samples and of a billion tokens (if any), on all GPUs.

    USD = hours of a step * sum over GPUs of their price per hour. ``path``: the file of prices.
    """
    groups = forecast.cluster.get("groups")
    groups = groups or [{"gpu": forecast.gpu, "gpus": forecast.world_size}]
    counts = [(gpu_named(g["gpu"]) or g["gpu"], g["gpus"]) for g in groups]
    prices = prices_of(path, [gpu for gpu, _ in counts])
    usd_per_s = sum(n * prices[gpu] for gpu, n in counts) / SECONDS_PER_HOUR
    usd = {"usd_per_step": usd_per_s * forecast.iteration_us * 1e-6}
    if forecast.samples_per_s:
        usd["usd_per_million_samples"] = MILLION * usd_per_s / forecast.samples_per_s
    if forecast.tokens_per_s:
        usd["usd_per_billion_tokens"] = BILLION * usd_per_s / forecast.tokens_per_s
    return usd
