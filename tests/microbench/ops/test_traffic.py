"""Times at which a GPU's cache, memory and SMs bound pointwise ops, norms and look-ups."""

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from itercast.learners.features.table import feature_table
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.ops.family import Family, Point
from itercast.microbench.ops.memory.elementwise import FAMILY as ELEMENTWISE
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.memory.traffic import moved_us

# 1 TB/s of memory, 100 SMs at 1 GHz: 2.1 TB/s from a cache of 40 MB
GPU = replace(
    load_gpu("a100-sxm-80gb"), hbm_bytes_per_s=1e12, l2_bytes=40e6, sm_count=100, clock_hz=1e9
)


def roofline_us(family: Family, p: Point, gpu: Gpu = GPU, **row: str) -> float:
    """The roofline of one row; 2 us pass on a GPU before a kernel runs."""
    rows = pd.DataFrame([{**asdict(p), "gpu": "it", **row}])
    return float(feature_table(rows, family, {"it": gpu})[1][0])


def test_what_the_cache_holds_moves_at_its_rate() -> None:
    """21 MB take 10 us from the cache and 21 from memory; 40 MB are half in it, 60 not at all."""
    assert moved_us(20e6, GPU, 0.0) == pytest.approx(20 / 2.1)
    assert moved_us(20e6, GPU, 1.0) == pytest.approx(20)
    assert moved_us(40e6, GPU, 0.0) == pytest.approx(20 / 2.1 + 20)
    assert moved_us(60e6, GPU, 0.0) == pytest.approx(60)


@pytest.mark.parametrize("name", [n for n in gpu_names() if n != "cpu"])
def test_more_bytes_take_longer(name: str) -> None:
    """From 1 kB to 10 GB, where the cache holds all of them, a part, or none."""
    us = moved_us(np.geomspace(1e3, 1e10, 300), load_gpu(name), 0.0)
    assert (np.diff(us) > 0).all()


def test_a_pointwise_op_is_faster_with_warm_caches() -> None:
    """A copy of 2 million floats moves 16 MB; 2 us pass before its kernel runs."""
    p = Elementwise(op="clone", numel=2_000_000, inner=2_000_000)
    assert roofline_us(ELEMENTWISE, p) == pytest.approx(2 + 16 / 2.1)
    assert roofline_us(ELEMENTWISE, p, cache="warm") == pytest.approx(2 + 16 / 2.1)
    assert roofline_us(ELEMENTWISE, p, cache="cold") == pytest.approx(2 + 16)


def test_a_cpu_keeps_the_plain_roofline() -> None:
    """Its caches are the learners' concern: bytes / bandwidth, and 1 us for the call."""
    cpu = replace(GPU, kind="cpu")
    p = Elementwise(op="clone", numel=2_000_000, inner=2_000_000)
    assert roofline_us(ELEMENTWISE, p, cpu) == pytest.approx(1 + 16)
