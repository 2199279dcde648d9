"""Time of memory-bound kernels whose integer instructions take about as long as their bytes.

A thread that computes addresses, bounds and indices for every element it reads executes more
instructions than a copy: an SM starts INTEGER_LANES of them a clock. Memory and instructions
overlap in part, so that time = sqrt(memory^2 + instructions^2).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Part
from itercast.microbench.ops.memory.elementwise import memory_copy

INTEGER_LANES: int = assumed(__file__, "integer_lanes")


def copy_with_instructions(nbytes: float, instructions: float, gpu: Gpu) -> Part:
    """A pass over memory of ``nbytes`` whose threads execute ``instructions`` on integers."""
    memory_s = max(nbytes, 1.0) / gpu.hbm_bytes_per_s
    integer_s = instructions / (INTEGER_LANES * gpu.sm_count * gpu.clock_hz)
    return replace(memory_copy(nbytes), times=float(np.hypot(1.0, integer_s / memory_s)))
