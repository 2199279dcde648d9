"""Times at which a GPU's cache, memory and SMs bound pointwise ops, norms and look-ups."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from itercast.learners.features.table import feature_table
from itercast.microbench.hardware.spec import Gpu, gpu_names, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family, Point
from itercast.microbench.ops.lookup.embedding import FAMILY as EMBEDDING
from itercast.microbench.ops.lookup.embedding import Embedding
from itercast.microbench.ops.memory.elementwise import FAMILY as ELEMENTWISE
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.memory.norm import FAMILY as NORM
from itercast.microbench.ops.memory.norm import Norm
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


def test_eager_norms_compute_while_generated_ones_wait_for_memory() -> None:
    """100 million bf16 elements: 400 MB are 400 us; half a clock of 100 SMs for each is 500 us."""
    p = Norm(op="layer", rows=100_000, cols=1_000, dtype="bf16")
    assert roofline_us(NORM, p) == pytest.approx(2 + 400 + 500)
    assert roofline_us(NORM, p, stack="torch-2.11") == pytest.approx(2 + 400 + 500)
    assert roofline_us(NORM, p, stack="cudnn-9.19.1") == pytest.approx(2 + 400 + 150)


def test_statistics_of_a_batch_norm_read_its_input_once_more() -> None:
    """10 million floats: three passes over 40 MB."""
    p = Norm(op="batch", rows=10, channels=1000, cols=1000)
    assert roofline_us(NORM, p) == pytest.approx(2 + 120)


def test_eager_look_ups_take_clocks_and_few_come_one_by_one() -> None:
    """10,000 rows of 1,000 bf16: 40 MB are 29.5 us; 1.6 clocks an element are 160 us."""
    p = Embedding(op="forward", rows=50_000, dim=1000, lookups=10_000, dtype="bf16")
    moved = 40.08 * (0.498 / 2.1 + 0.502)  # with 8 bytes an index; 49.8 % of it in the cache
    assert roofline_us(EMBEDDING, p) == pytest.approx(2 + 160)
    assert roofline_us(EMBEDDING, p, stack="liger") == pytest.approx(2 + moved)
    assert roofline_us(EMBEDDING, replace(p, op="backward")) < 2 + 160
    few = replace(p, lookups=10)
    assert roofline_us(EMBEDDING, few) == pytest.approx(2 + 6.3)


def test_a_cpu_keeps_the_plain_roofline() -> None:
    """Its caches are the learners' concern: bytes / bandwidth, and 1 us for the call."""
    cpu = replace(GPU, kind="cpu")
    p = Elementwise(op="clone", numel=2_000_000, inner=2_000_000)
    assert roofline_us(ELEMENTWISE, p, cpu) == pytest.approx(1 + 16)


def test_only_these_families_replace_bytes_over_bandwidth() -> None:
    """Others would have to be trained anew: bundles hold for the roofline they learned."""
    found = {name for name, family in families().items() if family.gpu_memory_us is not None}
    assert found == {"elementwise", "norm", "embedding"}
