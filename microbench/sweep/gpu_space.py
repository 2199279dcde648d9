"""Chooses the points that a GPU's sweep measures: sizes and dtypes of real training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family, Point

SMALL_US = 3.0  # roofline below which starting a kernel takes longer than its work
SMALL_SHARE = 0.15  # of a family's points at most
SMALL_DRAWN_FRAC = 0.1  # how often a small one is drawn; others cannot be made larger by any axis
MAX_ROOFLINE_US = 10_000.0
MAX_TIME_US = 20_000.0  # of one run: a point and its repetitions must not take a second
MAX_BYTES_FRAC = 0.04  # of the GPU's memory: a chunk of points is held at once
SIZE_ROUNDS = 6
SIZE_TOLERANCE = 1.1


def grid(name: str, seed: int) -> Iterator[Point]:
    """Yields the points that a family's file states for GPUs, before ``on_gpu`` sizes them.

    They are mostly in fp32, and without end except for family ``host``.
    """
    family = families()[name]
    points = family.gpu_sweep.points
    return family.sweep() if points is None else points(_rng(name, seed))


def on_gpu(
    name: str, points: Iterator[Point], gpu: Gpu, seed: int, captured: bool = False
) -> Iterator[Point]:
    """Yields points as trained on a GPU: in its dtypes, resized to rooflines of 3 us to a limit.

    Rooflines are log-uniform in this range. Sizes of ``captured`` points stay as models have them,
    unless they are too small or too large.
    """
    rng, family = _rng(name, seed + 1), families()[name]
    seen = small = 0
    for p in points:
        typed = retyped(family, p, gpu, rng)
        if typed is None:
            continue
        sized = resized(family, typed, gpu, rng, captured)
        if not fits(family, sized, gpu):
            continue
        is_small = 0 < roofline_us(family, sized, gpu) < limits_us(family, gpu)[0]
        if is_small and small + 1 > SMALL_SHARE * (seen + 1):
            continue
        seen, small = seen + 1, small + is_small
        yield sized


def _rng(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])


def roofline_us(family: Family, p: Point, gpu: Gpu) -> float:
    """Roofline in us: the larger of flops / peak and bytes / memory bandwidth."""
    flops_s = float(family.flops(p)) / gpu.peak(getattr(p, "dtype", "fp32"))
    return 1e6 * max(flops_s, float(family.bytes_moved(p)) / gpu.hbm_bytes_per_s)


def limits_us(family: Family, gpu: Gpu) -> tuple[float, float]:
    """Return the smallest and the largest roofline in us that are worth timing.

    Largest: a kernel that achieves ``slow_frac`` of it ends within MAX_TIME_US; unless the family
    is compute-bound, its bytes fit into MAX_BYTES_FRAC of memory. Smallest: SMALL_US, but not above
    a tenth of the largest.
    """
    sweep = family.gpu_sweep
    slow_us = MAX_TIME_US * sweep.slow_frac
    bytes_us = 1e6 * MAX_BYTES_FRAC * gpu.hbm_bytes / gpu.hbm_bytes_per_s
    high = min(MAX_ROOFLINE_US, slow_us if sweep.compute_bound else min(slow_us, bytes_us))
    return min(SMALL_US, high / 10), high


def fits(family: Family, p: Point, gpu: Gpu) -> bool:
    """Whether a point is short and small enough to be measured among many others."""
    held = max(float(family.bytes_moved(p)), family.gpu_sweep.allocated_bytes(p))
    short = roofline_us(family, p, gpu) <= SIZE_TOLERANCE * limits_us(family, gpu)[1]
    return short and held <= MAX_BYTES_FRAC * gpu.hbm_bytes


def retyped(family: Family, p: Point, gpu: Gpu, rng: np.random.Generator) -> Point:
    """Converts a point to a GPU's call, fp32 to dtypes GPUs train in; None if there is none."""
    sweep = family.gpu_sweep
    p = sweep.variant(p, rng)
    if getattr(p, "dtype", "") != "fp32":
        return p
    dtypes = [d for d in sweep.dtypes if d in gpu.peak_flops_per_s] or ["fp32"]
    weights = np.array([sweep.dtypes.get(d, 1.0) for d in dtypes])
    dtype = str(rng.choice(dtypes, p=weights / weights.sum()))
    return sweep.retype(p, dtype, gpu)


def resized(family: Family, p: Point, gpu: Gpu, rng: np.random.Generator, captured: bool) -> Point:
    """The point resized to a roofline drawn log-uniformly; one in ten is drawn below 3 us.

    A ``captured`` point, of a model's step, stays as it is where its roofline is worth timing.
    """
    low, high = limits_us(family, gpu)
    us, first_share = roofline_us(family, p, gpu), float(rng.random())
    wanted_us = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    if rng.random() < SMALL_DRAWN_FRAC:
        wanted_us = low * 10 ** -float(rng.random())
        captured = captured or us < low  # stays as it is if it is small already
        low = 0.0
    if us == 0 or (captured and low <= us <= high):
        return p
    for _ in range(SIZE_ROUNDS):
        if 1 / SIZE_TOLERANCE < wanted_us / us < SIZE_TOLERANCE:
            break
        p = family.gpu_sweep.resize(p, wanted_us / us, first_share)
        us = roofline_us(family, p, gpu)
    return p
