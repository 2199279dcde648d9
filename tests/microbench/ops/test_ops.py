"""Every family keeps the contract: it builds, runs, counts and makes the same features twice."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from op_calls import TOY, logged, spec

from itercast.microbench.opcall import OpCall, TensorSpec
from itercast.microbench.ops import families
from itercast.microbench.ops.family import DRAWN, repeated
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.ops.memory import elementwise, norm, reduction
from itercast.microbench.ops.step import optimizer
from itercast.microbench.store import read_rows

DATASETS = Path(__file__).parents[3] / "datasets"
SINGLE = sorted(n for n, f in families().items() if f.ranks == 1 and not f.on_demand)


@pytest.mark.parametrize("name", SINGLE)
def test_first_points_build_and_run(name: str) -> None:
    family = families()[name]
    for point in islice(family.sweep(), 25):
        if family.bytes_moved(point) < 5e7:
            family.build(point, "cpu").run()


def test_large_tensors_repeat_what_was_drawn() -> None:
    x = repeated(torch.randn, (3, DRAWN), "cpu")
    assert x.shape == (3, DRAWN) and x.is_contiguous()
    assert torch.equal(x[0], x[2]) and len(x[0].unique()) > DRAWN // 2
    assert len(repeated(torch.rand, (5, 7), "cpu").unique()) == 35


@pytest.mark.parametrize("name", sorted(families()))
def test_formulas_agree_on_one_point_and_on_columns(name: str) -> None:
    family = families()[name]
    points = list(islice(family.sweep(), 200))
    columns = SimpleNamespace(
        **{f.name: np.array([getattr(p, f.name) for p in points]) for f in fields(points[0])}
    )
    for formula in (family.flops, family.bytes_moved):
        one = [float(formula(p)) for p in points]
        assert np.allclose(formula(columns), one)
        assert min(one) >= 0
    wide = family.features(columns, TOY)
    for i, point in enumerate(points):
        for key, value in family.features(point, TOY).items():
            found = np.broadcast_to(wide[key], len(points))[i]
            if np.asarray(value).dtype.kind == "U":
                assert found == value
            else:
                assert np.isfinite(value) and found == pytest.approx(float(value))


def test_gemm_counts_by_hand() -> None:
    """A 2x4 by 4x3 product."""
    p = gemm.Gemm(m=2, n=3, k=4)
    assert gemm.flops(p) == 48  # 2 * 2*3*4
    assert gemm.bytes_moved(p) == 104  # (8 + 12 + 6) elements * 4 B


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_product_by_expert_is_built_as_it_is_captured(layout: str) -> None:
    """3 experts of 8 tokens each; weights' gradients are sums over tokens."""
    p = gemm.Gemm(op="grouped_mm", m=8, n=16, k=32, batch=3, layout=layout)
    (call,) = [c for c in logged(gemm.build(p, "cpu").run) if c.op == gemm.GROUPED]
    assert gemm.from_grouped(call) == p
    assert call.outputs[0].shape == ((3, 8, 16) if layout == "tn" else (24, 16))
    assert gemm.flops(p) == 2 * 3 * 8 * 16 * 32


def test_gemm_reads_transposed_views() -> None:
    b = TensorSpec(shape=(4, 3), dtype="fp32", stride=(1, 4))
    call = OpCall(op="aten.addmm.default", args=(spec(3), spec(2, 4), b))
    assert gemm.from_mm(call) == gemm.Gemm(op="addmm", m=2, n=3, k=4, layout="nt")


def test_norm_and_reduction_shapes() -> None:
    call = OpCall(op="aten.native_layer_norm.default", args=(spec(2, 5, 8), (8,), None, None, 1e-5))
    assert norm.from_layer(call) == norm.Norm(op="layer", rows=10, cols=8)
    call = OpCall(op="aten.sum.dim_IntList", args=(spec(4, 6, 3), (0, 1)))
    assert reduction.from_sum(call) == reduction.Reduction(op="sum", outer=1, size=24, inner=3)


def test_elementwise_broadcast_moves_fewer_bytes() -> None:
    call = OpCall(op="aten.add.Tensor", args=(spec(8, 16), spec(16)), outputs=(spec(8, 16),))
    p = elementwise.from_call(call)
    assert p == elementwise.Elementwise(op="add", numel=128, inner=16, tensors=2, form="row")
    assert elementwise.bytes_moved(p) == 128 * 2 * 4  # one read, one write


def test_optimizer_call_counts_lists() -> None:
    call = OpCall(op="aten._foreach_add_.List", args=((spec(3), spec(5)), (spec(3), spec(5))))
    p = optimizer.from_call(call)
    assert p == optimizer.OptimizerOp(op="_foreach_add_list", tensors=2, numel=8)
    assert optimizer.bytes_moved(p) == 3 * 8 * 4


def test_no_parameter_is_named_like_a_column_of_the_measurement() -> None:
    """A measured value would replace it: columns of real rows that are no parameter of theirs."""
    own = {name: {f.name for f in fields(family.params)} for name, family in families().items()}
    measured: set[str] = set()
    for name, names in own.items():
        measured |= set(read_rows([DATASETS], name).columns) - names
    assert {"samples", "threads", "time_us"} <= measured
    assert {name: taken for name, names in own.items() if (taken := names & measured)} == {}
