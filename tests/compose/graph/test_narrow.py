"""Linear layers in 8 and 4 bits: which products, what casts cost, which models are refused."""

import pytest
import torch
from torch import nn

from itercast.api import capture, predict
from itercast.capture.opcall import OpCall, StepCapture, stored_bytes
from itercast.compose.parallel.narrow import CAST, LARGEST, with_narrow_products
from itercast.microbench.ops.matrix.gemm import FAMILY


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


class Bare(nn.Module):
    """A linear layer outside of numbered blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def step(dtype: str, net: type[nn.Module] = Net, rows: int = 8, **options: bool) -> StepCapture:
    make = lambda: (net(), torch.randn(rows, 32), lambda y: y.square().mean())  # noqa: E731
    return capture(make, dtype=dtype, **options)


def products(step: StepCapture) -> list[OpCall]:
    return [c for c in step.calls if c.op in FAMILY.answers]


@pytest.mark.parametrize("amp", [False, True])
def test_products_of_linear_layers_in_blocks_are_in_fp8_the_head_is_not(amp: bool) -> None:
    """Four layers: forward, weight gradient, and input gradient but for the first layer's."""
    calls = products(step("fp8", amp=amp))
    in_fp8 = [c for c in calls if c.args[-1].dtype == "fp8"]
    assert len(in_fp8) == 4 * 3 - 1
    assert {c.outputs[0].dtype for c in in_fp8} == {"bf16"}
    assert len(calls) - len(in_fp8) == 3
    params = [FAMILY.answers[c.op](c) for c in in_fp8]
    assert {(p.op, p.layout, p.dtype) for p in params if p} == {("scaled_mm", "nt", "fp8")}


def test_each_activation_and_gradient_is_cast_once() -> None:
    """Four inputs forward, four gradients backward; all other calls are as in bf16."""
    wide, narrow = step("bf16"), step("fp8")
    casts = [c for c in narrow.calls if c.op == CAST]
    assert [c.phase for c in casts] == ["forward"] * 4 + ["backward"] * 4
    assert [c.op for c in narrow.calls if c.op != CAST] == [c.op for c in wide.calls]
    assert [p.name for p in narrow.parameters] == [p.name for p in wide.parameters]
    ready = [narrow.calls[p.ready_after].op for p in narrow.parameters]
    assert ready == [wide.calls[p.ready_after].op for p in wide.parameters]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layers in numbered blocks"):
        with_narrow_products(step("bf16", Bare), "fp8")


@pytest.mark.parametrize(
    ("gpu", "wide", "narrow", "least", "cast"),
    [
        ("h100-sxm-80gb", "bf16", "fp8", 0.4, "elementwise"),
        ("b200-sxm", "fp8", "nvfp4", 0.5, "reduction"),
    ],
)
def test_products_save_time_and_casts_cost_some(
    gpu: str, wide: str, narrow: str, least: float, cast: str
) -> None:
    """At least a half or 0.4 of the wider dtype's time; casts are copies; others stay, but for
    ops without a model: these are copies, too, of which the cache holds more or less. So it does
    of norms, which read what products wrote.
    """
    before, after = (
        predict("llama-300m", dtype=dtype, batch=4, seq=2048, gpu=gpu).by_family_us
        for dtype in (wide, narrow)
    )
    assert least < after["gemm"] / before["gemm"] < 1
    assert after[cast] > before[cast]
    others = before.keys() - {"gemm", "elementwise", "reduction", "unmodelled"}
    assert [after[x] for x in others] == pytest.approx([before[x] for x in others], rel=0.03)
    unmodelled = (found.get("unmodelled", 0.0) for found in (after, before))
    assert next(unmodelled) == pytest.approx(next(unmodelled), rel=0.03)


@pytest.mark.parametrize(
    ("gpu", "dtype"), [("a100-sxm-80gb", "fp8"), ("h100-sxm-80gb", "nvfp4"), ("cpu", "nvfp4")]
)
def test_gpus_without_such_units_refuse_it(gpu: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"no units for dtype '{dtype}'; it has \["):
        predict("llama-300m", dtype=dtype, batch=4, seq=2048, gpu=gpu)


def test_tensor_parallelism_cuts_products_in_fp8_as_well() -> None:
    size = {"batch": 4, "seq": 2048, "gpu": "h100-sxm-80gb", "dtype": "fp8"}
    whole, half = (predict("llama-300m", plan=plan, **size) for plan in ("", "tp=2"))
    assert half.by_family_us["gemm"] < 0.75 * whole.by_family_us["gemm"]


@pytest.mark.parametrize(("dtype", "share"), [("nvfp4", 0.5625), ("mxfp4", 0.53125)])
def test_blocks_of_four_bits_share_a_scale(dtype: str, share: float) -> None:
    """16 numbers and a byte are 9 bytes, 32 and a byte 17; a cast writes two copies of that.

    Of 32 x 64 bf16 numbers it reads 4,096 bytes; nvfp4 reads them once before, for the largest.
    """
    assert stored_bytes((32, 64), dtype) == 2048 * share
    calls = step(dtype, rows=32).calls
    assert len([c for c in calls if c.op in FAMILY.answers and c.args[-1].dtype == dtype]) == 11
    cast = next(c for c in calls if c.op == CAST and c.args[0].shape[1] == 64)
    moved = cast.args[0].nbytes + cast.outputs[0].nbytes
    assert moved == pytest.approx(4096 + 2 * 2048 * share, rel=1 / 32)
    assert len([c for c in calls if c.op == LARGEST]) == (8 if dtype == "nvfp4" else 0)
