"""Cold shares of memory: reuse distances and freed blocks counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from itercast.compose.graph.cache_reuse import cold_fractions, cold_share
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall, StepCapture, TensorSpec

CHIP = Gpu(name="chip", peak_flops_per_s={"fp32": 1e12}, l2_bytes=4000)


def tensor(storage: int, numel: int = 100) -> TensorSpec:
    return TensorSpec(shape=(numel,), dtype="fp32", stride=(1,), storage=storage)


def call(inputs: list[TensorSpec], output: TensorSpec) -> OpCall:
    return OpCall(
        op="aten.add.Tensor", args=tuple(inputs), kwargs={}, outputs=(output,), phase="forward"
    )


def test_memory_is_cold_when_more_than_the_cache_was_touched_since_its_last_use() -> None:
    # tensors 0 to 3 of 400 B are there before the step; each call reads one and writes another
    calls = (
        call([tensor(0), tensor(1)], tensor(1)),
        call([tensor(2), tensor(3)], tensor(3)),
    )
    step = StepCapture(calls=calls)
    # between two accesses 800 B of the other call are touched
    assert cold_fractions(step, CHIP) == [0.0, 0.0]
    assert cold_fractions(step, replace(CHIP, l2_bytes=500)) == [1.0, 1.0]
    assert cold_fractions(step, replace(CHIP, l2_bytes=800)) == [0.5, 0.5]


def test_two_passes_over_a_long_list_find_it_cold_on_a_cpu() -> None:
    # each call touches 800 B, one element after the other: half of this call and half of the one
    # before lie between two accesses of an element, 800 B; share = 800 / l2_bytes - 0.5
    calls = (call([tensor(0), tensor(1)], tensor(1)),) * 2
    cpu = replace(CHIP, kind="cpu", l2_bytes=800)
    assert cold_fractions(StepCapture(calls=calls), cpu) == [0.5, 0.5]
    assert cold_fractions(StepCapture(calls=calls), replace(cpu, kind="gpu")) == [0.0, 0.0]


def test_a_new_tensor_takes_a_freed_block() -> None:
    # 1 is made from 0 and freed by the call that makes 2; 2 is never used and freed at once
    step = StepCapture(calls=(call([tensor(0)], tensor(1)), call([tensor(1)], tensor(2))))
    small = replace(CHIP, l2_bytes=400)  # cold share = distance / 400 - 0.5, within 0 and 1
    # lap two, call 0: tensor 0 was last touched 800 B ago (cold 1), block of 1 or 2 right now (0)
    # call 1: tensor 1 was just made (0), the other free block was touched at the end of lap one
    first, second = cold_fractions(step, small)
    assert first == pytest.approx(0.5)
    assert second == pytest.approx(0.5)


def test_a_measured_curve_is_followed_between_its_points() -> None:
    curve = {"1": 0.0, "4": 0.4, "16": 1.0}
    share = cold_share(replace(CHIP, cold_share=curve))
    mib = 2**20
    assert share(0) == 0.0
    assert share(2 * mib) == pytest.approx(0.2)  # half-way between 1 and 4 on a log scale
    assert share(64 * mib) == 1.0
