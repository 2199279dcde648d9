"""Which calls torch.compile's kernels take together, by bytes counted by hand.

The kernels of torch 2.13's scheduler for one Llama layer were the pattern of these.
"""

import pytest
import torch
from plan_case import call
from torch import nn

from itercast.api import capture
from itercast.capture.opcall import COMPLEX, StepCapture, TensorSpec
from itercast.compose.graph.compiled.fusion_order import in_fusion_order
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.launch_modes import as_launched, with_engine
from itercast.microbench.ops.memory.fused import CALL

ROWS, WIDTH = 64, 32
FULL = 2 * ROWS * WIDTH  # bytes of a tensor of activations in bf16


def tensor(storage: int, *shape: int, dtype: str = "bf16") -> TensorSpec:
    return TensorSpec(shape=shape or (ROWS, WIDTH), dtype=dtype, storage=storage)


def moved(step: StepCapture) -> list[tuple[str, int, int]]:
    """Phase, bytes read and bytes written of each fused kernel."""
    return [
        (c.phase, sum(t.nbytes for t in c.tensors()), sum(t.nbytes for t in c.outputs))
        for c in step.calls
        if c.op == CALL
    ]


def gated() -> StepCapture:
    """silu(x g) * (x u), and its backward; between the ops are products."""
    g, u, w = (tensor(n, WIDTH, WIDTH) for n in range(3))
    x, a, s, b, y, out, dy, ds, db, da = (tensor(n) for n in range(3, 13))
    calls = (
        call("mm.default", [x, g], a),
        call("silu.default", [a], s),
        call("mm.default", [x, u], b),
        call("mul.Tensor", [s, b], y),
        call("mm.default", [y, w], out),
        call("mm.default", [out, w], dy, "backward"),
        call("mul.Tensor", [dy, s], db, "backward"),
        call("mul.Tensor", [dy, b], ds, "backward"),
        call("mm.default", [db, u], tensor(13), "backward"),
        call("silu_backward.default", [ds, a], da, "backward"),
        call("mm.default", [da, g], tensor(14), "backward"),
    )
    return StepCapture(calls=calls)


def test_a_gated_layer_is_one_kernel_each_way_although_products_are_between() -> None:
    """Forward reads a and b and writes y; backward reads dy, a and b and writes db and da."""
    found = moved(inductor_kernels(gated()))
    assert found == [("forward", 2 * FULL, FULL), ("backward", 3 * FULL, 2 * FULL)]


def test_calls_are_made_before_they_are_read() -> None:
    """Two readers of one call, of which one stays since it is overwritten later."""
    a, b, c, d, e = (tensor(n) for n in range(5))
    w = tensor(9, WIDTH, WIDTH)
    calls = (
        call("relu.default", [a], b),
        call("mm.default", [a, w], tensor(5)),
        call("neg.default", [b], c),
        call("mm.default", [a, w], tensor(6)),
        call("exp.default", [b], d),
        call("add_.Tensor", [c, d], c),
        call("mm.default", [c, w], e),
    )
    is_pointwise = lambda c: "mm" not in c.op  # noqa: E731
    found = in_fusion_order(StepCapture(calls=calls), is_pointwise, is_pointwise, lambda c: 0)
    made = {a.storage, w.storage}
    for one in found.calls:
        assert made.issuperset(t.storage for t in one.tensors())
        made |= {t.storage for t in one.outputs}
    assert sorted(c.op for c in found.calls) == sorted(c.op for c in calls)


class Residual(nn.Module):
    """Products, a residual sum, and a norm in fp32 as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        h = first + self.a(first)
        wide = h.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return h + self.b(self.weight * normed.to(h.dtype))


def test_a_norm_after_a_residual_keeps_neither_its_wide_copy_nor_what_it_scales() -> None:
    """Forward writes the norm's result, a number of 4 bytes per row, and the sum.

    Both products are kept, the first one since a gradient needs it: backward takes the sum, the
    wide copy and what it scales from them. One kernel reads both and two gradients, writes one.
    """
    make = lambda: (Residual(), torch.randn(ROWS, WIDTH), lambda y: y.sum())  # noqa: E731
    step = with_engine(capture(make, dtype="bf16", optimizer="none"), "compile")
    found = moved(as_launched(step))
    numbers = 4 * ROWS
    assert found[0] == ("forward", 2 * FULL + 2 * WIDTH, 2 * FULL + numbers)
    whole = 4 * FULL + 2 * WIDTH + numbers
    assert max(found[2:], key=lambda one: one[1:]) == (
        "backward",
        pytest.approx(whole, abs=8),
        FULL,
    )


class Norm(nn.Module):
    """transformers' norm alone, whose backward starts from a gradient that is given."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


def test_backward_of_a_norm_reads_its_gradient() -> None:
    """Input and gradient, added to the input's gradient; both again for the weight's."""
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    options = {"dtype": "bf16", "optimizer": "none", "loss": "none"}
    step = with_engine(capture(lambda: (Norm(), inputs), **options), "compile")
    numbers, row = 4 * ROWS, 2 * WIDTH
    assert [one for one in moved(as_launched(step)) if one[0] == "backward"] == [
        ("backward", 3 * FULL + numbers + row, FULL),
        ("backward", 2 * FULL + numbers, row),
    ]


def test_sums_that_backward_needs_are_kept_rather_than_made_of_earlier_ones() -> None:
    """A sum is as many bytes as what was added: backward reads g, the sum h1, and h0."""
    h0, a, h1, y, g, d = (tensor(n) for n in range(6))
    w = tensor(9, WIDTH, WIDTH)
    calls = (
        call("tanh.default", [tensor(10)], h0),
        call("mm.default", [h0, w], a),
        call("add.Tensor", [h0, a], h1),
        call("mm.default", [h1, w], y),
        call("mm.default", [y, w], g, "backward"),
        call("mul.Tensor", [g, h1], d, "backward"),
        call("mul.Tensor", [d, h0], tensor(6), "backward"),
    )
    found = moved(inductor_kernels(StepCapture(calls=calls)))
    assert found[-1][:2] == ("backward", 3 * FULL)


class Turned(nn.Module):
    """A rotary embedding in complex numbers between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")
        half = torch.ones(ROWS, WIDTH // 2)
        self.register_buffer("turn", torch.polar(half, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.a(x)
        pairs = torch.view_as_complex(q.float().reshape(ROWS, -1, 2))
        return self.b(torch.view_as_real(pairs * self.turn).flatten(1).to(q.dtype))


def test_complex_numbers_are_multiplied_by_torchs_own_kernel() -> None:
    """q is cast to fp32, multiplied, and cast back: three kernels."""
    make = lambda: (Turned(), torch.randn(ROWS, WIDTH), lambda y: y.sum())  # noqa: E731
    step = as_launched(with_engine(capture(make, dtype="bf16", optimizer="none"), "compile"))
    forward = [c for c in step.calls if c.phase == "forward" and "mm" not in c.op]
    assert [(c.op, COMPLEX in c.kwargs) for c in forward] == [
        (CALL, False),
        ("aten.mul.Tensor", True),
        (CALL, False),
    ]
    assert moved(step)[:2] == [("forward", FULL, 2 * FULL), ("forward", 2 * FULL, FULL)]
