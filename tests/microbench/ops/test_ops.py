"""Every family keeps the contract: it builds, runs, counts and sweeps what it answers for."""

from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from op_calls import TOY, logged
from torch.utils._python_dispatch import TorchDispatchMode

from itercast.microbench.ops import families
from itercast.microbench.ops.family import DRAWN, repeated
from itercast.microbench.ops.lookup import index, index_calls
from itercast.microbench.ops.memory import elementwise_names, norm, random, reduction
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.step import host, optimizer
from itercast.microbench.store import read_rows

DATASETS = Path(__file__).parents[3] / "datasets"
SINGLE = sorted(n for n, f in families().items() if f.ranks == 1 and not f.on_demand)
NAMES = ("embedding_bag", "pooling", "index", "random", "optimizer", "elementwise")
NAMES += ("attention", "conv", "norm", "reduction")
FAMILIES = {name: families()[name] for name in NAMES}
STREAM = {"skew": 0.0, "repeats": 0.0, "unique": 0, "reuse": "", "spread": 0.0}
ENOUGH = 1500  # points in which every op of a sweep shows up


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
        found = [family.answers[c.op](c) for c in calls if c.op in family.answers]
        if name == "optimizer":  # few elements leave no choice
            found = [replace(one, aligned_frac=p.aligned_frac) for one in found]
        assert found == [known]


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"attention", "conv"}))
def test_twice_of_any_size_never_costs_less(name: str, points: dict[str, list[Any]]) -> None:
    family, some = FAMILIES[name], points[name][:300]
    columns = {f.name: np.array([getattr(p, f.name) for p in some]) for f in fields(some[0])}
    for formula in (family.flops, family.bytes_moved):
        least = formula(SimpleNamespace(**columns))
        for key, values in columns.items():
            if values.dtype.kind == "i" and not key.startswith(("stride", "padding")):
                assert np.all(formula(SimpleNamespace(**{**columns, key: 2 * values})) >= least)


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


def test_no_parameter_is_named_like_a_column_of_the_measurement() -> None:
    """A measured value would replace it: columns of real rows that are no parameter of theirs."""
    own = {name: {f.name for f in fields(family.params)} for name, family in families().items()}
    measured: set[str] = set()
    for name, names in own.items():
        measured |= set(read_rows([DATASETS], name).columns) - names
    assert {"samples", "threads", "time_us"} <= measured
    assert {name: taken for name, names in own.items() if (taken := names & measured)} == {}


def test_a_host_is_timed_three_times_before_wrappers() -> None:
    ops = [p.op for p in host.sweep()]
    first = next(i for i, op in enumerate(ops) if op in (*host.WRAPPERS, *host.SHARDED))
    assert all(ops[:first].count(event) == 4 for event in host.EVENTS)  # the fourth round's own
    assert all(ops.count(op) == 8 for op in (*host.EVENTS, *host.WRAPPERS))


def test_an_expanded_tensor_is_divided_by_a_number() -> None:
    """The gradient of a mean; a unary op takes the expanded tensor alone."""
    for op in ("div", "exp"):
        call = Elementwise(op=op, numel=640, inner=80, tensors=1, form="col")
        family = families()["elementwise"]
        assert family.build(call, "cpu").run().shape.numel() == 640
