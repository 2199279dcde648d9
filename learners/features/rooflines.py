"""Rooflines of ops: the time that computing and moving data take at a device's rates, in us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family, Point, Values

LAUNCH_FLOOR_US = assumed(__file__, "launch_floor_us")  # by kind of device
MIN_BANDWIDTH_SHARE = assumed(__file__, "min_bandwidth_share")
SAME_SLOWDOWN = assumed(__file__, "same_slowdown")  # dtypes without a stated rate
USUAL_SLOWDOWN = assumed(__file__, "usual_slowdown")


def bounds_us(
    family: Family,
    p: Point,
    gpu: Gpu,
    threads: Values,
    rate: Callable[[Gpu, str], float] = Gpu.full_rate,
) -> tuple[Values, Values]:
    """Compute and memory bound of each row in us: FLOP / rate of the dtype, bytes / bandwidth.

    On a CPU both rates are times threads / cores, the bandwidth at least times
    MIN_BANDWIDTH_SHARE. ``rate`` is mostly that of the tensor cores without the limit that some
    cards put on it, or less where the family's kernels are bound (``Family.rate``).
    """
    share = np.clip(np.asarray(threads, dtype=float) / gpu.sm_count, 1 / gpu.sm_count, 1.0)
    share = share if gpu.kind == "cpu" else np.ones_like(share)
    rates = rates_by_row(p, partial(rate, gpu))
    if family.rate is not None:
        rates = np.minimum(rates, family.rate(p, gpu))
    compute_s = np.asarray(family.flops(p), dtype=float) / (rates * share)
    memory_s = np.asarray(family.bytes_moved(p), dtype=float)
    memory_s = memory_s / (gpu.hbm_bytes_per_s * np.maximum(share, MIN_BANDWIDTH_SHARE))
    return compute_s * 1e6, memory_s * 1e6


def rates_by_row(p: Point, rate: Callable[[str], float]) -> np.ndarray:
    """FLOP/s of each row's dtype."""
    codes, names = pd.factorize(np.asarray(p.dtype, dtype=object))
    return np.array([rate(str(name)) for name in names])[codes]


def achieved_rate(gpu: Gpu, dtype: str) -> float:
    """FLOP/s that large products achieve on a GPU, by its file or by other GPUs' files.

    If its file states none, the rate of an equally slow dtype is taken (SAME_SLOWDOWN), else peak /
    USUAL_SLOWDOWN.
    """
    same = SAME_SLOWDOWN.get(dtype, "") if dtype in gpu.peak_flops_per_s else ""
    for stated in (dtype, same):
        if stated in gpu.achieved_flops_per_s:
            share = gpu.achieved_flops_per_s[stated] / gpu.full_rate(stated)
            return gpu.full_rate(dtype) * share
    return gpu.full_rate(dtype) / (USUAL_SLOWDOWN if gpu.kind == "gpu" else 1.0)


def roofline_us(
    family: Family, p: Point, gpu: Gpu, threads: Values, cold: Values = 0.0, stack: Values = ""
) -> Values:
    """Roofline in us: max(compute, memory bound) + launch floor, or the family's ``floor_us``.

    Computing is at the rate that large products achieve where the family does so
    (``at_achieved_rate``). On GPUs the memory bound is the family's ``gpu_memory_us`` where it
    states one.
    """
    if family.floor_us is not None:
        return np.asarray(family.floor_us(p, gpu), dtype=float)
    rate = achieved_rate if family.at_achieved_rate else Gpu.full_rate
    compute_us, memory_us = bounds_us(family, p, gpu, threads, rate)
    if family.gpu_memory_us is not None and gpu.kind != "cpu":
        memory_us = np.asarray(family.gpu_memory_us(p, gpu, cold, stack), dtype=float)
    return np.asarray(np.maximum(compute_us, memory_us) + LAUNCH_FLOOR_US[gpu.kind])
