"""Casts to fp8 of compiled steps, counted by hand from torchao's Float8Linear."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from itercast.api import capture
from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.compiled.torchao_casts import CAST, LARGEST, with_torchao_casts
from itercast.compose.graph.launch_modes import as_launched, with_engine

ROWS = 1024
INPUT, OUTPUT, WEIGHT = 32 * ROWS, 64 * ROWS, 32 * 64  # elements


class Net(nn.Module):
    """A block of one linear layer after a product that is not in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(32, 64, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.stem(x))


def step() -> StepCapture:
    make = lambda: (Net(), torch.randn(ROWS, 16), lambda y: y.square().mean())  # noqa: E731
    return capture(make, dtype="fp8", optimizer="none")


def moved(calls: list[OpCall]) -> list[tuple[str, str, int, int]]:
    """Of what makes a copy in fp8, or its scale: phase, op, bytes read and written."""
    return [
        (
            c.phase,
            c.op,
            sum(t.nbytes for t in c.tensors() if t.shape),
            sum(t.nbytes for t in c.outputs if t.shape),
        )
        for c in calls
        if c.op == LARGEST or (c.op == CAST and c.outputs[0].dtype == "fp8")
    ]


@pytest.mark.parametrize("weights", [False, True])
def test_factors_are_read_for_their_scale_and_again_for_their_cast(weights: bool) -> None:
    """The gradient is cast in two layouts, the input again for the gradient of the weight."""
    found = moved(list(with_torchao_casts(step(), weights=weights).calls))
    activations = [
        ("forward", LARGEST, 2 * INPUT, 0),
        ("forward", CAST, 2 * INPUT, INPUT),
        ("backward", LARGEST, 2 * OUTPUT, 0),
        ("backward", CAST, 2 * OUTPUT, 2 * OUTPUT),
        ("backward", CAST, 2 * INPUT, INPUT),
    ]
    of_weight = [
        ("forward", LARGEST, 2 * WEIGHT, 0),
        ("forward", CAST, 2 * WEIGHT, WEIGHT),
        ("backward", CAST, 2 * WEIGHT, WEIGHT),
    ]
    assert sorted(found) == sorted(activations + of_weight * weights)


def test_products_read_what_was_cast_for_them() -> None:
    """Each factor in fp8 of a product is what a cast before it in the same phase wrote."""
    made: dict[int, str] = {}
    products = 0
    for c in with_torchao_casts(step(), weights=True).calls:
        factors = [t for t in c.tensors() if t.dtype == "fp8"]
        assert [made[t.storage] for t in factors] == [c.phase] * len(factors)
        products += bool(factors)
        made |= {t.storage: c.phase for t in c.outputs if t.dtype == "fp8"}
    assert products == 3


def test_only_compiled_steps_have_them() -> None:
    """The compiled step: one kernel finds the input's scale, another one casts it."""
    assert as_launched(step()).calls == step().calls
    kernels = [c for c in as_launched(with_engine(step(), "compile")).calls if "fused" in c.op]
    first, second = kernels[:2]
    assert {t.dtype for t in first.outputs} == {"fp32"}
    assert "fp8" in {t.dtype for t in second.outputs}


@pytest.mark.parametrize(("numel", "kernels"), [(4096, 1), (16384, 2)])
def test_what_reads_a_long_tensors_largest_number_is_another_kernel(
    numel: int, kernels: int
) -> None:
    """Blocks share a reduction of more than 8192 elements to one: the next kernel reads ``a``, too.

    It computes x again rather than read it, as ``should_realize_on_reuse`` in torch/_inductor/ir.py
    has it for what is made of up to four tensors.
    """
    a, x = (TensorSpec(shape=(numel,), dtype="bf16", storage=i) for i in range(2))
    scale = TensorSpec(shape=(), dtype="bf16", storage=2)
    calls = (
        OpCall(op="aten.relu.default", args=(a,), outputs=(x,), phase="forward"),
        OpCall(op=LARGEST, args=(x, (), False), outputs=(scale,), phase="forward"),
        OpCall(
            op="aten.div.Tensor", args=(x, scale), outputs=(replace(x, storage=3),), phase="forward"
        ),
    )
    found = inductor_kernels(StepCapture(calls=calls)).calls
    assert len(found) == kernels
    written = [t.storage for c in found for t in c.outputs]
    assert written == ([3] if kernels == 1 else [2, 3])
    assert [[t.storage for t in c.tensors()] for c in found][-1] == [0, 2][:kernels]
