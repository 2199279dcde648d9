"""How long a GPU takes to move the bytes of a kernel, part of which its last cache may hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import software_name
from itercast.microbench.ops.family import Values

SM_BYTES_PER_CLOCK: float = assumed(__file__, "sm_bytes_per_clock")
# Bytes touched, over the size of the last cache, up to and from which memory is warm and cold.
WARM_UP_TO: float
COLD_FROM: float
WARM_UP_TO, COLD_FROM = assumed(__file__, "warm_and_cold_fill")
GENERATED: Sequence[str] = facts_of(__file__)["generated"]


def held_share(nbytes: Values, gpu: Gpu) -> Values:
    """The share of bytes that the last cache still holds after as many bytes were touched.

    Falls linearly from 1 at ``WARM_UP_TO * l2_bytes`` to 0 at ``COLD_FROM * l2_bytes``.
    """
    held = (COLD_FROM - nbytes / gpu.l2_bytes) / (COLD_FROM - WARM_UP_TO)
    return min(1.0, max(0.0, held)) if isinstance(held, float) else np.clip(held, 0.0, 1.0)


def moved_us(nbytes: Values, gpu: Gpu, cold: Values) -> Values:
    """Time in us: bytes / rate of what the cache holds, and of what comes from memory.

    The last cache delivers SM_BYTES_PER_CLOCK to each SM. It holds nothing where ``cold`` is 1.
    """
    held = (1 - cold) * held_share(nbytes, gpu)
    cache_bytes_per_s = SM_BYTES_PER_CLOCK * gpu.sm_count * gpu.clock_hz
    rate = max(cache_bytes_per_s, gpu.hbm_bytes_per_s)
    return 1e6 * nbytes * (held / rate + (1 - held) / gpu.hbm_bytes_per_s)


def computed_us(elements: Values, clocks: Values, gpu: Gpu) -> Values:
    """Time in us in which all SMs together compute these elements, each in ``clocks`` clocks."""
    return 1e6 * elements * clocks / (gpu.sm_count * gpu.clock_hz)


def is_generated(stack: Values) -> Values:
    """Whether a software, or each of an array of them, compiles kernels for the shape at hand."""
    if isinstance(stack, str):
        return software_name(stack) in GENERATED
    return np.fromiter((software_name(name) in GENERATED for name in stack), bool, len(stack))
