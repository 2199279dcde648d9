"""Cold shares of memory: reuse distances and freed blocks counted by hand."""

from dataclasses import replace

import pytest

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.cache_reuse import cold_fractions, cold_share
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.microbench.hardware.spec import Gpu

CHIP = Gpu(name="chip", peak_flops_per_s={"fp32": 1e12}, l2_bytes=4000)


def tensor(storage: int, numel: int = 100) -> TensorSpec:
    return TensorSpec(shape=(numel,), dtype="fp32", stride=(1,), storage=storage)


def call(inputs: list[TensorSpec], output: TensorSpec) -> OpCall:
    return OpCall(
        op="aten.add.Tensor", args=tuple(inputs), kwargs={}, outputs=(output,), phase="forward"
    )


def test_memory_is_cold_when_more_than_the_cache_was_touched_since_its_last_use() -> None:
    # tensors 0 to 5 of 400 B are there before the step; each call reads one and writes another
    calls = tuple(call([tensor(n), tensor(n + 1)], tensor(n + 1)) for n in (0, 2, 4))
    step = StepCapture(calls=calls)
    # between two uses the other calls touch 1,600 B; no cache has distance / l2_bytes - 0.5 of it
    assert cold_fractions(step, CHIP) == [0.0, 0.0, 0.0]
    assert cold_fractions(step, replace(CHIP, l2_bytes=500)) == [1.0, 1.0, 1.0]
    assert cold_fractions(step, replace(CHIP, l2_bytes=1600)) == [0.5, 0.5, 0.5]
    # its warm row was measured with its own 800 B between: 1/6 is lost there, 5/6 here
    assert cold_fractions(step, replace(CHIP, l2_bytes=1200)) == pytest.approx([0.8, 0.8, 0.8])


def test_a_cpu_passes_over_tensors_one_element_after_the_other() -> None:
    # half of this call and half of the last one count too: 1,600 B between two uses, not 800
    calls = tuple(call([tensor(n), tensor(n + 1)], tensor(n + 1)) for n in (0, 2))
    cpu = replace(CHIP, kind="cpu", l2_bytes=1600)
    assert cold_fractions(StepCapture(calls=calls), cpu) == [0.5, 0.5]
    assert cold_fractions(StepCapture(calls=calls), replace(cpu, kind="gpu")) == [0.0, 0.0]
    # the same op over and over is what a warm row measures
    assert cold_fractions(StepCapture(calls=calls[:1] * 2), cpu) == [0.0, 0.0]
    # another rank touches as many in the same cache: 3,200 B of 1,600, 800 of its own twice
    assert cold_fractions(StepCapture(calls=calls), cpu, ranks=2) == [1.0, 1.0]


def test_a_new_tensor_takes_a_freed_block() -> None:
    # 1 is made from 0 and freed by the call that makes 2; 2 is never used and freed at once
    other = tensor(5, 200)
    calls = (call([tensor(0)], tensor(1)), call([tensor(1)], tensor(2)), call([other], other))
    chip = replace(CHIP, l2_bytes=1600)  # cold share = distance / 1600 - 0.5, each call has 800 B
    # lap two, call 0: tensor 0 was last touched 1,600 B ago (0.5), block of 1 or 2 800 B ago (0)
    # call 1: tensor 1 was just made (0), the other free block was touched 1,600 B ago (0.5)
    assert cold_fractions(StepCapture(calls=calls), chip) == pytest.approx([0.25, 0.25, 0.5])


def test_a_measured_curve_is_followed_between_its_points() -> None:
    curve = {"1": 0.0, "4": 0.4, "16": 1.0}
    share = cold_share(replace(CHIP, cold_share=curve))
    mib = 2**20
    assert share(0, 0) == 0.0
    assert share(2 * mib, 0) == pytest.approx(0.2)  # half-way between 1 and 4 on a log scale
    assert share(64 * mib, 0) == 1.0
    assert share(8 * mib, 4 * mib) == pytest.approx(0.5)  # of the 0.6 beyond 4 MiB 0.3
    assert share(4 * mib, 8 * mib) == 0.0
    assert share(64 * mib, 16 * mib) == 1.0
    assert cold_share(replace(CHIP, cold_share=curve), 2)(4 * mib, 2 * mib) == pytest.approx(0.5)


def test_a_second_use_of_what_was_in_memory_has_a_curve_of_its_own() -> None:
    """Caches that keep what is used twice: 2 MiB after its first use half is gone, later a quarter.

    x is used twice in a step, with 2 MiB between and 32 MiB, beyond all caches, behind.
    """
    mib = 2**20 // 4
    x, z, y = tensor(0, mib), tensor(1, 2 * mib), tensor(2, 32 * mib)
    step = StepCapture(calls=tuple(call([t], t) for t in (x, z, x, y)))
    chip = replace(CHIP, cold_share={"1": 0.0, "4": 0.5, "16": 1.0})
    twice = replace(chip, cold_share_second={"1": 0.0, "4": 1.0})
    assert [cold_fractions(step, c)[2] for c in (chip, twice)] == pytest.approx([0.25, 0.5])
    assert cold_fractions(step, chip)[0] == cold_fractions(step, twice)[0] == 1.0
    # without the 32 MiB the cache keeps x from step to step: no use is the first one
    short = StepCapture(calls=step.calls[:3])
    assert cold_fractions(short, twice) == cold_fractions(short, chip)


def test_ranks_that_share_a_cpu_find_less_in_its_cache(gpt: StepCapture) -> None:
    """No op is warmer beside a second rank, some are colder; GPUs have a cache each."""
    cpu = replace(CHIP, kind="cpu", l2_bytes=2e6)
    for chip, colder in ((cpu, True), (replace(cpu, kind="gpu"), False)):
        alone, beside = (rank_graph(gpt, ParallelPlan.parse(p), chip).cold for p in ("", "dp=2"))
        assert all(a <= b for a, b in zip(alone, beside, strict=True))
        assert (sum(alone) < sum(beside)) == colder
