"""Rate at which a GPU sustains matrix products under its power limit.

A step keeps a GPU busy for seconds, and its power limit then sets the clock; rows of single ops are
measured in bursts of milliseconds, at clocks it cannot hold. Power of the SMs goes with
clock * voltage^2 and voltage with the clock: power = SMs * clock^3 * constant, so that GPUs with
the same SMs have

    rate = rate of the reference * (SMs / its SMs)^(2/3) * (power limit / its limit)^(1/3)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.switches import is_on
from itercast.microbench.hardware.spec import Gpu, load_gpu

REFERENCE_GPU: Mapping[str, str] = assumed(__file__, "reference_gpu")
CLOCK_EXPONENT: float = assumed(__file__, "clock_exponent")
SAME_SMS: float = assumed(__file__, "same_sms")


@lru_cache(maxsize=256)
def _reference(architecture: str) -> Gpu | None:
    """The GPU of this architecture whose sustained rate is known, if there is one."""
    name = REFERENCE_GPU.get(architecture)
    return load_gpu(name) if name else None


def sustained_flops_per_s(gpu: Gpu, dtype: str) -> float:
    """FLOP/s of large products in steps of seconds; infinite where no reference says it.

    In a dtype that the reference states no rate of, its bf16 rate times the ratio of the peaks.
    """
    reference = _reference(gpu.architecture)
    if not (is_on("power_limit") and reference and gpu.power_w):
        return float("inf")
    per_clock = [x.full_rate("bf16") / (x.sm_count * x.clock_hz) for x in (gpu, reference)]
    if max(per_clock) > (1 + SAME_SMS) * min(per_clock):  # other tensor cores
        return float("inf")
    rated_dtype = dtype if dtype in reference.achieved_flops_per_s else "bf16"
    scale = gpu.peak(dtype) / gpu.peak(rated_dtype)
    sms = gpu.sm_count / reference.sm_count
    power = gpu.power_w / reference.power_w
    rate = reference.achieved_flops_per_s[rated_dtype] * sms * (power / sms) ** CLOCK_EXPONENT
    return float(scale * rate)


def throttled_us(gpu: Gpu, dtype: str, us: float, flops: float) -> float:
    """Time of a matrix product, not below that at the rate which the power limit sustains."""
    if gpu.kind == "cpu" or not us:
        return us
    return max(us, 1e6 * flops / sustained_flops_per_s(gpu, dtype))
