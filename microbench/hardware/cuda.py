"""The CUDA device at hand as a Gpu value."""

from __future__ import annotations

from typing import Any

from microbench.hardware.names import gpu_named
from microbench.hardware.spec import Gpu, load_gpu, slug


def gpu_of(properties: Any) -> Gpu:
    """Our facts where we have a file for this device, else torch's properties and safe guesses.

    Guessed peaks: 128 multiply-adds per SM and clock in fp32, eight times that in bf16.
    """
    known = gpu_named(properties.name)
    if known is not None:
        return load_gpu(known)
    fp32 = properties.multi_processor_count * 128 * 2 * properties.clock_rate * 1e3
    return Gpu(
        name=slug(properties.name),
        sm_count=properties.multi_processor_count,
        peak_flops_per_s={"fp32": fp32, "bf16": 8 * fp32, "fp16": 8 * fp32, "tf32": 4 * fp32},
        hbm_bytes_per_s=2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8,
        hbm_bytes=float(properties.total_memory),
        l2_bytes=float(properties.L2_cache_size),
    )
