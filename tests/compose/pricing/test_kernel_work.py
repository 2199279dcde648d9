"""Ops that no model has seen are priced by bytes, waits and instructions of torch's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unseen_ops import GPU, MODELS, Fixed

from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.compose.pricing.price_book import Priceable, PriceBook
from itercast.learners.transfer.bytes_in_flight import LATENCY_NS
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import family_of
from itercast.microbench.ops.family import Part
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.ops.memory.pooling import Pooling
from itercast.microbench.ops.memory.reduction import Reduction
from itercast.microbench.ops.memory.reduction_kernels import nll_waits, scan_threads

SLOW_CLOCK = replace(GPU, clock_hz=1e9)


def parts(params: object, gpu: Gpu = SLOW_CLOCK, channels_last: bool = False) -> list[Part]:
    return fallback_parts(params, MODELS, channels_last, gpu)


@pytest.mark.parametrize("op", ["sum", "mean", "argmax", "linalg_vector_norm", "var", "any"])
def test_a_reduction_reads_every_element_once(op: str) -> None:
    """64 x 1000 of 4 bytes read, 64 results written."""
    point = Reduction(op=op, outer=64, size=1000)
    assert parts(point) == [memory_copy((64 * 1000 + 64) * 4)]
    assert parts(replace(point, op="_softmax")) == []  # which a model has seen


def test_a_loss_of_two_tensors_is_a_pointwise_kernel_and_a_sum() -> None:
    """Two tensors read and one written, which a sum reads; without a sum three."""
    assert parts(Reduction(op="mse_loss", outer=1, size=1000)) == [memory_copy(4 * 1000 * 4)]
    assert parts(Reduction(op="mse_loss", outer=1000, size=1)) == [memory_copy(3 * 1000 * 4)]
    back = Reduction(op="mse_loss_backward", outer=1000, size=1)
    assert parts(back) == parts(replace(back, outer=1, size=1000)) == [memory_copy(3 * 1000 * 4)]


def test_one_block_sums_the_losses_of_all_rows() -> None:
    """8192 rows: 512 threads take 16 rows each, and read a target before the class it names."""
    assert nll_waits(8192) == 2 * 16
    assert nll_waits(1) == 2
    assert nll_waits(32 * 16) == 2 * 16  # 32 threads
    assert nll_waits(2**20) == 2 * 1024  # 1024 threads
    (found,) = parts(Reduction(op="nll_loss_forward", outer=8192, size=10))
    assert (found.family, found.waits) == ("reduction", 32)


def test_a_scan_goes_along_its_rows_in_chunks() -> None:
    """128 rows of 4000 elements: 128 threads a row, 4 rows a block, 32 blocks on 8 SMs.

    A row has 16 chunks of 256; a thread executes 27 instructions and 14 on each of 8 levels.
    """
    assert scan_threads(128, 4000) == 128
    assert scan_threads(2**15, 2**15) == 16
    assert scan_threads(1, 2**20) == scan_threads(2, 2**20) == 512
    moved = 2 * 128 * 4000 * 4
    integer_s = 32 * 512 * 16 * (27 + 14 * 8) / (64 * 8 * 1e9)
    (found,) = parts(Reduction(op="cumsum", outer=128, size=4000))
    assert found.waits == 16
    assert found.params == memory_copy(moved).params
    assert found.times == pytest.approx(np.hypot(1, integer_s / (moved / 1e12)))
    one_block = Reduction(op="cumsum", outer=4, size=4000)  # one SM of eight works
    (alone,) = parts(one_block)
    assert alone.times > parts(replace(one_block, outer=32))[0].times
    assert parts(replace(one_block, outer=1)) == [memory_copy(2 * 4000 * 4)]
    (columns,) = parts(replace(one_block, inner=64))
    assert columns == replace(memory_copy(2 * 4 * 4000 * 64 * 4), waits=4000)


def test_few_channels_of_a_batch_norm_occupy_few_sms() -> None:
    """A block of 512 threads reads 16 bytes a thread, twice: 2 * (16 * 4096 / 2048) waits.

    Its time does not fall with fewer channels, though its bytes do.
    """
    few = Norm(op="batch", rows=16, cols=4096, channels=4)
    (found,) = parts(few)
    assert found == replace(memory_copy(3 * 16 * 4096 * 4 * 4), waits=2 * 32)
    assert parts(replace(few, channels=2))[0].waits == found.waits
    assert parts(replace(few, channels=64))[0].waits == 2 * found.waits  # 32 blocks at a time
    assert parts(few, channels_last=True) == [replace(found, waits=0)]
    assert parts(replace(few, cols=1))[0].waits == 0  # a matrix, whose columns are channels


def test_a_group_norm_waits_for_its_statistics_alone() -> None:
    """8 channels of 4096 in a group, 512 at a time: 64 waits; then a read and a write."""
    statistics, pointwise = parts(Norm(op="group", rows=1, cols=4096, channels=64, groups=8))
    assert statistics == replace(memory_copy(64 * 4096 * 4), waits=64)
    assert pointwise == memory_copy(2 * 64 * 4096 * 4)


def test_an_op_takes_at_least_as_long_as_its_waits() -> None:
    """Everything is forecast as 10 us, but 4096 waits take longer, 2 do not."""
    book = PriceBook(Fixed(), SLOW_CLOCK, 0)

    def us(rows: int) -> float:
        params = Norm(op="batch", rows=rows, cols=1024, channels=4)
        op = Priceable(
            op="aten.native_batch_norm.default",
            phase="forward",
            family=family_of(params),
            params=params,
            bytes_moved=0.0,
            cold=1.0,
        )
        return book.price([op])[0].duration_us

    assert us(1) == 10
    assert us(4096) == pytest.approx(4096 * LATENCY_NS * 1e-3)


def test_windows_cost_instructions_beside_their_bytes() -> None:
    """4 x 4 windows: 130 instructions an output, of an average 22 for each of 4 rows and 2 a tap,
    of a maximum 12 and 10. A window is no larger than its image.
    """
    image: dict[str, Any] = {"batch": 2, "channels": 8, "h": 67, "w": 67, "out_h": 64, "out_w": 64}
    point = Pooling(op="avg_pool2d", kernel_h=4, kernel_w=4, **image)
    moved = 16 * (67 * 67 + 64 * 64) * 4
    integer_s = 16 * 64 * 64 * (130 + 4 * 22 + 16 * 2) / (64 * 8 * 1e9)
    (found,) = parts(point)
    assert found.params == memory_copy(moved).params
    assert found.times == pytest.approx(np.hypot(1, integer_s / (moved / 1e12)))
    maximum = replace(point, op="max_pool2d_with_indices")
    moved += 16 * 64 * 64 * 8  # indices
    integer_s *= (130 + 4 * 12 + 16 * 10) / (130 + 4 * 22 + 16 * 2)
    assert parts(maximum)[0].times == pytest.approx(np.hypot(1, integer_s / (moved / 1e12)))
    whole = replace(point, out_h=1, out_w=1, kernel_h=67, kernel_w=67)
    assert parts(replace(whole, kernel_h=2304, kernel_w=2304)) == parts(whole)
    assert parts(point, load_gpu("h100-sxm-80gb"))[0].times < found.times
    for other in (replace(point, op="upsample_bilinear2d"), replace(point, channels_last=True)):
        assert parts(other) == []
