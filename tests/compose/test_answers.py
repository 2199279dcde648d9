"""What a forecast says of itself: notes, how sure it is that a step fits, plans without effect."""

from dataclasses import replace

import pytest
from law_case import forecast_for, model, rank_for
from plan_case import GPU, Flat

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.notes import notes
from itercast.compose.parallel.device_memory import verdict
from itercast.compose.simulate.memory.rank_memory import Sizes, rank_memory
from itercast.microbench.hardware.stack import load_stack


@pytest.mark.parametrize(
    ("gigabytes", "said"),
    [(70, "fits"), (76, "fits"), (80, "too close: 76 to 84 of 80 GB"), (85, "does not fit")],
)
def test_a_step_near_the_memory_s_size_is_not_told_to_fit(gigabytes: int, said: str) -> None:
    """Five per cent either way of what is forecast, against 80 GB."""
    assert verdict(gigabytes * 1e9, 80e9) == said


def test_a_forecast_says_how_its_memory_fits(gpt: StepCapture) -> None:
    found = forecast_for(gpt, "")
    assert found.memory_verdict == verdict(found.memory_bytes, found.memory_room_bytes) == "fits"
    tight = replace(GPU, name="tight", hbm_bytes=1e6)
    assert forecast_for(gpt, "", tight, Flat).memory_verdict == "does not fit"


def test_layers_on_a_slow_path_are_named() -> None:
    """State-space layers of transformers are captured op by op, their fused kernels are not."""
    found = model("gpt")
    call = replace(found.calls[0], module="Mamba2Mixer")
    slow = replace(found, calls=(call, *found.calls[1:]))
    (said,) = notes(slow, ParallelPlan(), "torch-2.11")
    assert said.startswith("Mamba2Mixer as plain torch ops")
    assert list(notes(found, ParallelPlan(), "torch-2.11")) == []


def test_tensor_parallelism_by_dtensor_is_said() -> None:
    found, tp = model("gpt"), ParallelPlan.parse("tp=2")
    (said,) = notes(found, tp, "torch-2.11")
    assert said.startswith("tp is torch's DTensor, whose Python takes a fast host about 0.7 ms")
    for step, stack in ((found, "megatron-core"), (replace(found, engine="compile"), "torch-2.11")):
        assert list(notes(step, tp, stack)) == []


def test_selective_recomputation_needs_attention() -> None:
    with pytest.raises(ValueError, match="selective recomputes attention, the model has none"):
        rank_for("images", "recompute=selective")
    block = rank_for("gpt", "recompute=selective").layers[1]
    assert block.saved_bytes < block.layer.saved_bytes


def test_deepspeed_holds_gradients_of_backward_beside_their_sums(gpt: StepCapture) -> None:
    """A weight in bf16: 2 bytes of a gradient and 4 of its sum, 4 of a copy and 8 of moments."""
    halves = tuple(replace(p, dtype="bf16") for p in gpt.parameters)
    found = replace(gpt, parameters=halves)
    layers = rank_for(found, "", replace(GPU, name="bf", peak_flops_per_s={"fp32": 1, "bf16": 1}))
    sizes = Sizes.of([(x, 1) for x in layers.layers])
    numbers = sizes.trained // 2
    held = rank_memory(sizes, ParallelPlan(), "adamw", held=load_stack("deepspeed").held)
    assert held["optimizer"] == (4 + 8) * numbers
    assert sizes.held_by_rank(ParallelPlan(), "adamw", load_stack("deepspeed").held) == (
        6 * numbers,
        12 * numbers,
    )
