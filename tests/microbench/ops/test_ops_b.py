"""Bags, pooling, indexing, random numbers, fused steps and pointwise names: counts and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from op_calls import logged
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.opcall import OpCall, TensorSpec
from itercast.microbench.ops import families
from itercast.microbench.ops.lookup import embedding_bag, index, index_calls, random_streams
from itercast.microbench.ops.matrix import attention, conv
from itercast.microbench.ops.memory import (
    elementwise,
    elementwise_names,
    norm,
    pooling,
    random,
    reduction,
)
from itercast.microbench.ops.step import optimizer

MODULES = (embedding_bag, pooling, index, random, optimizer, elementwise)
MODULES += (attention, conv, norm, reduction)
FAMILIES = {m.FAMILY.name: m.FAMILY for m in MODULES}
STREAM = {"skew": 0.0, "repeats": 0.0, "unique": 0, "reuse": "", "spread": 0.0}
ENOUGH = 6000  # points in which every op of a sweep shows up


def described(calls: list[OpCall], name: str) -> list[Any]:
    """What a family reads out of the calls it answers for."""
    answers = FAMILIES[name].answers
    return [answers[c.op](c) for c in calls if c.op in answers]


@pytest.fixture(scope="module")
def points() -> dict[str, list[Any]]:
    """Sweeps without sparse gradients, which are captured as the rows that they move."""
    return {
        name: [p for p in islice(f.sweep(), ENOUGH) if p.op != "sparse_backward"]
        for name, f in FAMILIES.items()
    }


def reachable(name: str) -> set[str]:
    """Every op string that the answers of a family can give."""
    names = {tuple(full.split(".")[1:]) for full in FAMILIES[name].answers}
    if name in ("embedding_bag", "attention", "conv"):
        return {"forward", "backward"}
    if name == "norm":
        return set(norm.FLOPS_PER_ELEMENT)
    if name == "elementwise":
        exponents = (None, 1, 2, 2.5)
        found = {elementwise_names.canonical(op, o, e) for op, o in names for e in exponents}
        return found | {elementwise_names.SCALAR_AS.get(op, op) for op in found}
    same_as = {
        "index": index_calls.FACTS["same_as"],
        "random": random.FACTS["same_as"],
        "reduction": reduction.FACTS["same_as"],
        "optimizer": optimizer.SAME_AS,
    }.get(name, {})
    found = {same_as.get(op, op) for op, _ in names}
    if name == "pooling":
        end = "_upsample_nearest_exact2d"
        found = {op.replace(end, "upsample_nearest2d") for op in found}
        found = {op.replace("3d", "2d").replace("trilinear", "bilinear") for op in found}
    if name == "index":
        found |= {"index_put_accumulate", "index_put_accumulate_"}
    if name == "optimizer":
        found |= {"_foreach_add_list", "_fused_sgd_momentum", "_fused_adam_amsgrad"}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_that_is_answered_is_swept(name: str, points: dict[str, list[Any]]) -> None:
    assert reachable(name) == {p.op for p in points[name]}


def test_every_scalar_op_is_swept_with_a_scalar(points: dict[str, list[Any]]) -> None:
    swept = {p.op for p in points["elementwise"] if p.form == "scalar"}
    assert swept == set(elementwise_names.SCALAR)


def test_no_op_is_answered_twice() -> None:
    """By two families for tensors of one layout, that is."""
    names = [(op, kind) for f in families().values() for kind in f.layouts for op in f.answers]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_point_runs_the_call_it_describes(name: str, points: dict[str, list[Any]]) -> None:
    """The first 40 points, and one of every op and form; large ones are skipped."""
    if name == "attention":
        pytest.skip("decomposed on a CPU")
    family = FAMILIES[name]
    kinds: dict[Any, Any] = {}
    for p in points[name]:
        if family.bytes_moved(p) < 2e6 and family.flops(p) < 1e6:
            kinds.setdefault((p.op, getattr(p, "form", ""), p.dtype), p)
    first = [p for p in points[name][:40] if family.bytes_moved(p) < 2e7 > family.flops(p)]
    for p in (*first, *kinds.values()):
        if p.op.startswith("rms"):
            continue  # decomposed, too
        calls = logged(family.build(p, "cpu").run)
        unseen = {"embedding_bag": STREAM, "optimizer": {"zero_frac": 0.0}}  # values do
        known = replace(p, **unseen.get(name, {}))
        assert described(calls, name) == [known]


@pytest.mark.parametrize("name", [m.FAMILY.name for m in MODULES if m not in (attention, conv)])
def test_twice_of_any_size_never_costs_less(name: str, points: dict[str, list[Any]]) -> None:
    family, some = FAMILIES[name], points[name][:300]
    columns = {f.name: np.array([getattr(p, f.name) for p in some]) for f in fields(some[0])}
    for formula in (family.flops, family.bytes_moved):
        least = formula(SimpleNamespace(**columns))
        for key, values in columns.items():
            if values.dtype.kind == "i" and not key.startswith(("stride", "padding")):
                assert np.all(formula(SimpleNamespace(**{**columns, key: 2 * values})) >= least)


def test_embedding_bag_by_hand() -> None:
    """Two bags of three rows out of ten, rows of four floats."""
    p = embedding_bag.EmbeddingBag(op="forward", rows=10, dim=4, bags=2, lookups=6)
    assert embedding_bag.flops(p) == 6 * 4
    assert embedding_bag.bytes_moved(p) == (6 + 2) * 4 * 4 + 8 * (6 + 2)
    back = replace(p, op="backward")
    assert embedding_bag.bytes_moved(back) == (2 + 10 + 2 * 6) * 4 * 4 + 8 * (6 + 2)


@pytest.mark.parametrize(("rows", "lookups"), [(1, 5), (50, 40), (1000, 3000), (100000, 5000)])
@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0, 1.3])
def test_unique_rows_are_estimated(rows: int, lookups: int, skew: float) -> None:
    """Against the sum over all ranks, and against indices as drawn twenty times."""
    sizes = {"rows": rows, "lookups": lookups, "skew": skew}
    p = embedding_bag.EmbeddingBag(op="forward", dim=4, bags=1, **sizes)
    weight = np.arange(1, rows + 1, dtype=float) ** -skew
    exact = np.sum(1 - (1 - weight / weight.sum()) ** lookups)
    assert random_streams.unique_rows(p) == pytest.approx(exact, rel=0.05)
    torch.manual_seed(0)
    drawn = [len(np.unique(random_streams.zipf_indices(p, "cpu"))) for _ in range(20)]
    assert np.mean(drawn) == pytest.approx(exact, rel=0.1, abs=1)


def test_pooling_by_hand() -> None:
    """2x3 planes of 8x8 to 4x4 by windows of 3x3."""
    image = {"batch": 2, "channels": 3, "h": 8, "w": 8, "out_h": 4, "out_w": 4}
    window = {"kernel_h": 3, "kernel_w": 3, "stride_h": 2, "stride_w": 2}
    p = pooling.Pooling(op="max_pool2d_with_indices", **image, **window)
    assert pooling.flops(p) == 6 * 16 * 9
    assert pooling.bytes_moved(p) == 6 * ((64 + 16) * 4 + 16 * 8)  # and int64 indices
    back = replace(p, op="max_pool2d_with_indices_backward")
    assert pooling.flops(back) == 6 * 16
    assert pooling.bytes_moved(replace(p, op="avg_pool2d")) == 6 * (64 + 16) * 4
    assert pooling.flops(pooling.Pooling(op="_adaptive_avg_pool2d", **image)) == 6 * 16 * 4
    assert pooling.flops(pooling.Pooling(op="upsample_bilinear2d", **image)) == 6 * 16 * 8


def test_pooling_reads_calls() -> None:
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    found = described(logged(lambda: torch.nn.functional.max_pool2d(x, 3, 2, 1)), "pooling")
    window = {
        f"{n}_{a}": v for n, v in (("kernel", 3), ("stride", 2), ("padding", 1)) for a in "hw"
    }
    sizes = {"batch": 2, "channels": 3, "h": 9, "w": 8, "out_h": 5, "out_w": 4}
    assert found == [pooling.Pooling(op="max_pool2d_with_indices", **sizes, **window)]
    row = logged(lambda: torch.nn.functional.avg_pool1d(x[0], 4))  # an empty stride is the kernel
    sizes = {"batch": 3, "channels": 9, "h": 1, "w": 8, "out_h": 1, "out_w": 2}
    window = {"kernel_w": 4, "stride_w": 4}
    assert described(row, "pooling") == [pooling.Pooling(op="avg_pool2d", **sizes, **window)]
    dilated = logged(lambda: torch.nn.functional.max_pool2d(x, 2, dilation=2))
    sizes = {"batch": 2, "channels": 3, "h": 9, "w": 8, "out_h": 4, "out_w": 3}
    window = {f"{n}_{a}": 2 for n in ("kernel", "stride") for a in "hw"} | {"dilation": 2}
    spaced = pooling.Pooling(op="max_pool2d_with_indices", **sizes, **window)
    assert described(dilated, "pooling") == [spaced]
    for op in (spaced.op, f"{spaced.op}_backward"):
        pooling.build(replace(spaced, op=op), "cpu").run()
    row = TensorSpec(shape=(2, 3, 1, 8), dtype="fp32", stride=(24, 8, 8, 1))  # of max_pool1d
    ends = (replace(row, shape=(2, 3, 1, 3)),)
    args = (row, (1, 2), (1, 2), (0, 0), (1, 3))
    call = OpCall(op="aten.max_pool2d_with_indices.default", args=args, outputs=ends)
    sizes = {"batch": 2, "channels": 3, "h": 1, "w": 8, "out_h": 1, "out_w": 3, "dilation": 3}
    window = {"kernel_w": 2, "stride_w": 2}
    assert pooling.from_call(call) == pooling.Pooling(op=spaced.op, **sizes, **window)
    uneven = logged(lambda: torch.nn.functional.max_pool2d(x, 2, dilation=(1, 2)))
    assert described(uneven, "pooling") == [None]


def test_index_by_hand() -> None:
    """2 x 3 of 5 slots, runs of 4 floats."""

    def moved(op: str, **more: Any) -> float:
        p = index.IndexOp(op=op, outer=2, size=3, inner=4, source=5)
        return float(index.bytes_moved(replace(p, **more)))

    n, full = 24, 40
    assert moved("gather") == 2 * n * 4 + 8 * n
    assert moved("index_select") == 2 * n * 4 + 8 * 3
    assert moved("scatter_add_") == 3 * n * 4 + 8 * n  # values and sums read, sums written
    assert moved("scatter_add") == moved("scatter_add_") + 2 * full * 4  # into a copy
    assert moved("cat", source=3, tensors=3) == 2 * n * 4
    assert moved("slice_backward") == moved("constant_pad_nd") == (n + full) * 4
    assert moved("slice_scatter") == (2 * n + 2 * full) * 4
    assert moved("repeat") == (8 + n) * 4  # read once, written three times
    assert moved("topk", k=2) == (n + 16) * 4 + 16 * 8
    assert moved("sort") == 2 * n * 4 + n * 8
    assert moved("unfold_backward", k=2) == (48 + full) * 4
    p = index.IndexOp(op="sort", outer=2, size=8, inner=4)
    assert index.flops(p) == 64 * 3
    assert index.flops(replace(p, op="index_add_")) == 64
    assert index.flops(replace(p, op="topk", k=4)) == 64 + 32 * 2


def test_an_index_and_its_gradient_are_read() -> None:
    x, rows = torch.randn(7, 5, requires_grad=True), torch.tensor([[0, 1, 1]])
    calls = logged(lambda: x[rows].sum().backward())
    taken = index.IndexOp(op="index", outer=1, size=3, inner=5, source=7)
    assert described(calls, "index") == [taken, replace(taken, op="index_put_accumulate")]
    calls = logged(lambda: torch.cat([x[:, 1:], x], 1))
    joined = index.IndexOp(op="cat", outer=7, size=9, source=9, tensors=2)
    assert described(calls, "index") == [joined]
    calls = logged(lambda: x.detach()[x > 0])
    assert described(calls, "index") == [None]  # a size that depends on data


def test_random_by_hand() -> None:
    p = random.RandomOp(op="native_dropout", size=100)
    assert random.bytes_moved(p) == 100 * (4 + 4 + 1)  # x, y, mask
    assert random.bytes_moved(replace(p, op="bernoulli_")) == 100 * 4
    assert random.flops(replace(p, op="normal_")) == 10 * random.flops(
        replace(p, op="native_dropout_backward")
    )
    drawn = replace(p, op="multinomial", rows=3, draws=2)
    assert random.bytes_moved(drawn) == 3 * 100 * 4 + 3 * 2 * 8
    found = described(logged(lambda: torch.multinomial(torch.rand(3, 9), 2, True)), "random")
    sampled = random.RandomOp(op="multinomial", size=9, rows=3, draws=2, replacement=True)
    assert found[-1] == sampled


FUSED: dict[str, tuple[Callable[..., Any], int]] = {
    "_fused_adamw_": (lambda p: torch.optim.AdamW(p, fused=True), 7),
    "_fused_adam_": (lambda p: torch.optim.Adam(p, fused=True), 7),
    "_fused_adam_amsgrad": (lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True), 9),
    "_fused_sgd_": (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), 3),
    "_fused_sgd_momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 5),
}


@pytest.mark.parametrize("op", FUSED)
def test_a_fused_step_is_read(op: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    make, operands = FUSED[op]
    step = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    found = [p for p in described(logged(step.step), "optimizer") if "fused" in p.op]
    assert found == [optimizer.OptimizerOp(op=op, tensors=2, numel=8)]
    assert optimizer.bytes_moved(found[0]) == operands * 8 * 4


class Operands(TorchDispatchMode):
    """Keeps the tensors that calls were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for a in args:
            self.seen += [t for t in (a if isinstance(a, list) else [a]) if torch.is_tensor(t)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["elementwise", "optimizer", "index"])
def test_operands_neither_vanish_nor_overflow(name: str, points: dict[str, list[Any]]) -> None:
    """An in-place call, 500 times: denormal numbers would be slow, and are not what models have."""
    size = index.moved if name == "index" else lambda p: p.numel
    small = (p for p in points[name] if size(p) < 5000 and p.dtype == "fp32")
    changed = {p.op: p for p in small if p.op.endswith("_")}
    assert len(changed) >= 3
    for p in changed.values():
        run = FAMILIES[name].build(p, "cpu").run
        with Operands() as operands:
            run()
        for _ in range(500):
            run()
        values = torch.cat([t.flatten() for t in operands.seen if t.is_floating_point()])
        assert values.isfinite().all()
        assert ((values == 0) | (values.abs() > 1e-30)).all()
