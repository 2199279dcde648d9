"""LAMB: one step by hand, the tensors it reads and writes, the memory it needs."""

import torch

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.target import find_target, forecast_step
from itercast.extras.optimizers.lamb import DECAY, Lamb
from itercast.microbench.ops import find_family
from itercast.microbench.ops.step.optimizer import OptimizerOp, bytes_moved


def small(optimizer: str, inputs: int = 1000, outputs: int = 100) -> StepCapture:
    """A step of a layer with a bias."""
    module = torch.nn.Linear(inputs, outputs)
    return capture(module, torch.ones(8, inputs), lambda y: y.sum(), optimizer=optimizer)


def test_a_first_step_moves_each_tensor_by_its_norm() -> None:
    """|p| = 5. Corrected moments are g and g^2, so the update is sign(g) + decay * p."""
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    zero = torch.nn.Parameter(torch.zeros(2))  # a norm of zero: the update as it is
    p.grad, zero.grad = torch.tensor([0.5, -2.0]), torch.tensor([1.0, -1.0])
    Lamb([p, zero], lr=0.1).step()
    update = torch.tensor([1 + DECAY * 3, -1 + DECAY * 4])
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 5 / update.norm() * update
    torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(zero.detach(), torch.tensor([-0.1, 0.1]), rtol=1e-4, atol=1e-5)


def test_a_step_reads_and_writes_twelve_tensors_like_the_parameters() -> None:
    """Update: p g m v read, m v u written; norms of p and u; last p u read, p written."""
    calls = [c for c in small("lamb").calls if c.phase == "optimizer"]
    found = [find_family(c)[1] for c in calls]
    assert all(isinstance(p, OptimizerOp) for p in found)
    assert {(p.tensors, p.numel) for p in found} == {(2, 100_100)}
    assert [bytes_moved(p) / (100_100 * 4) for p in found] == [7, 1, 1, 3]


def test_memory_is_adams_and_the_step_takes_longer() -> None:
    """It moves 12 tensors where fused AdamW moves 7."""
    assert STATE_COPIES["lamb"] == STATE_COPIES["adamw"] == 2
    target = find_target("a100-sxm-80gb", "", None, "", "")
    lamb, adam = (
        forecast_step(small(name, 4099, 4096), target) for name in ("lamb", "adamw_fused")
    )
    state = [found.memory_by_bytes["optimizer"] for found in (lamb, adam)]
    assert state == 2 * [2 * 4100 * 4096 * 4]
    assert lamb.compute_us > adam.compute_us
