"""The CUDA device of this machine as a ``Gpu``."""

from __future__ import annotations

from typing import Any

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.hardware.spec import Gpu, load_gpu, slug

FP32_FLOPS_PER_SM_AND_CLOCK = assumed(__file__, "fp32_flops_per_sm_and_clock")
PEAK_OVER_FP32 = assumed(__file__, "peak_over_fp32")
MEMORY_TRANSFERS_PER_CLOCK = assumed(__file__, "memory_transfers_per_clock")


def gpu_of(properties: Any) -> Gpu:
    """The ``Gpu`` of a device, from ``torch.cuda.get_device_properties``.

    From its hardware file where there is one. Else peaks are assumed:
    fp32 = SMs * clock * 256 FLOP, other dtypes a multiple of it,
    bandwidth = 2 * memory clock * bus width in bytes.
    """
    known = gpu_named(properties.name)
    if known is not None:
        return load_gpu(known)
    clock_hz = properties.clock_rate * 1e3  # kHz
    fp32 = properties.multi_processor_count * FP32_FLOPS_PER_SM_AND_CLOCK * clock_hz
    transfers_per_s = MEMORY_TRANSFERS_PER_CLOCK * properties.memory_clock_rate * 1e3  # kHz
    return Gpu(
        name=slug(properties.name),
        sm_count=properties.multi_processor_count,
        peak_flops_per_s={"fp32": fp32} | {d: n * fp32 for d, n in PEAK_OVER_FP32.items()},
        hbm_bytes_per_s=transfers_per_s * properties.memory_bus_width / 8,
        hbm_bytes=float(properties.total_memory),
        l2_bytes=float(properties.L2_cache_size),
    )
