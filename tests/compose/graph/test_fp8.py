"""fp8 of linear layers: which products, what they cost, who is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compose.parallel.fp8 import CAST, with_fp8
from itercast.api import capture, predict
from microbench.opcall import OpCall, StepCapture
from microbench.ops.matrix.gemm import FAMILY


class Net(nn.Module):
    """Two blocks of two linear layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in "ab"
        )
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Turned(nn.Module):
    """GPT-2's form: a weight of inputs by outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class OneBlock(nn.Module):
    """Of one such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Turned())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Bare(nn.Module):
    """No block has a number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def step(dtype: str, net: type[nn.Module] = Net, **options: bool) -> StepCapture:
    make = lambda: (net(), torch.randn(8, 32), lambda y: y.square().mean())  # noqa: E731
    return capture(make, dtype=dtype, **options)


def products(found: StepCapture) -> list[OpCall]:
    return [c for c in found.calls if c.op in FAMILY.answers]


@pytest.mark.parametrize("amp", [False, True])
def test_three_products_of_each_linear_layer_but_not_the_head_s(amp: bool) -> None:
    """Four layers: forward, gradient of the weight, and of the input but for the first."""
    found = products(step("fp8", amp=amp))
    narrow = [c for c in found if c.args[-1].dtype == "fp8"]
    assert len(narrow) == 4 * 3 - 1
    assert {c.outputs[0].dtype for c in narrow} == {"bf16"}
    assert len(found) - len(narrow) == 3
    asked = [FAMILY.answers[c.op](c) for c in narrow]
    assert {(p.op, p.layout, p.dtype) for p in asked if p} == {("scaled_mm", "nt", "fp8")}


def test_the_gradient_of_a_weight_that_lies_turned_is_in_fp8_too() -> None:
    """There the activation comes first and the gradient second."""
    assert [c.args[-1].dtype for c in products(step("fp8", OneBlock))] == ["fp8"] * 2


def test_what_meets_a_weight_is_cast_once() -> None:
    """Four inputs forward, four gradients backward; all else is as in bf16."""
    wide, found = step("bf16"), step("fp8")
    casts = [c for c in found.calls if c.op == CAST]
    assert [c.phase for c in casts] == ["forward"] * 4 + ["backward"] * 4
    assert [c.op for c in found.calls if c.op != CAST] == [c.op for c in wide.calls]
    assert [p.name for p in found.parameters] == [p.name for p in wide.parameters]
    ready = [found.calls[p.ready_after].op for p in found.parameters]
    assert ready == [wide.calls[p.ready_after].op for p in wide.parameters]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layers in numbered blocks"):
        with_fp8(step("bf16", Bare))


def test_llama_gains_on_an_h100_and_an_a100_has_no_such_units() -> None:
    """Its products halve at most; casts are copies, the rest stays."""
    size = {"batch": 4, "seq": 2048, "gpu": "h100-sxm-80gb"}
    wide, found = (predict("llama-300m", dtype=dtype, **size) for dtype in ("bf16", "fp8"))
    assert 0.4 < found.by_family_us["gemm"] / wide.by_family_us["gemm"] < 1
    others = [{**f.by_family_us, "gemm": 0, "elementwise": 0} for f in (wide, found)]
    assert others[0] == pytest.approx(others[1], rel=1e-3)
    assert found.by_family_us["elementwise"] > wide.by_family_us["elementwise"]
    with pytest.raises(ValueError, match="gpu 'a100-sxm-80gb': no units for dtype 'fp8'"):
        predict("llama-300m", dtype="fp8", **{**size, "gpu": "a100-sxm-80gb"})


def test_a_dtype_nobody_knows_is_named_with_those_allowed() -> None:
    with pytest.raises(ValueError, match="dtype 'fp4': allowed are fp32, tf32, bf16, fp16, fp8"):
        step("fp4")


def test_tensor_parallelism_cuts_products_in_fp8_as_well() -> None:
    size = {"batch": 4, "seq": 2048, "gpu": "h100-sxm-80gb", "dtype": "fp8"}
    whole, half = (predict("llama-300m", plan=plan, **size) for plan in ("", "tp=2"))
    assert half.by_family_us["gemm"] < 0.75 * whole.by_family_us["gemm"]
