"""Ops that libraries run as a whole: mixtures of experts, and modules such as losses and norms."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from microbench.hardware.spec import Gpu
from microbench.ops.matrix import experts
from microbench.ops.matrix.experts import Experts
from microbench.ops.memory import elementwise, module
from microbench.ops.memory.module import DIRECTIONS, OPS, Module

TOY = Gpu(name="toy", sm_count=4, peak_flops_per_s={"fp32": 1e12})


def layer(**changes: object) -> Experts:
    """Four tokens of 8 numbers, each to 2 of 4 experts of width 16, all on one rank."""
    sizes = {"tokens": 4, "hidden": 8, "inner": 16, "experts": 4, "topk": 2, "local": 4}
    return Experts(**{"op": "layer", **sizes, **changes})  # type: ignore[arg-type]


def test_experts_counted_by_hand() -> None:
    """4 tokens x 2 experts are 8 pairs, each three products of 8 x 16."""
    assert experts.flops(layer()) == 2 * 8 * 3 * 8 * 16
    assert experts.flops(layer(op="gate_up")) == 2 * 8 * 2 * 8 * 16
    assert experts.flops(layer(op="down")) == 2 * 8 * 8 * 16
    assert experts.flops(layer(op="down_full")) == 3 * experts.flops(layer(op="down"))
    assert experts.used(layer()) == 4 * (1 - 0.5**4)
    moved = 3.75 * 8 * 16 * 3 + 8 * (8 + 8)
    assert experts.bytes_moved(layer()) == 4 * moved


def test_ranks_together_do_the_work_of_one() -> None:
    """Experts or their width shared by two ranks: half the flops each."""
    for half in (layer(local=2), layer(inner=8)):
        assert 2 * experts.flops(half) == experts.flops(layer())


def test_more_tokens_use_more_experts_up_to_all() -> None:
    found = [experts.used(layer(tokens=n)) for n in (1, 2, 8, 64)]
    assert found == sorted(found) and found[0] == 2 and found[-1] == pytest.approx(4)


@pytest.mark.parametrize("op", experts.MATRICES)
def test_experts_build_and_run(op: str) -> None:
    """On a CPU each product has its shape; a rank's share alone cannot be timed."""
    points = (p for p in experts.sweep() if p.op == op and experts.bytes_moved(p) < 2e7)
    for point in islice(points, 3):
        experts.build(point, "cpu").run()
    found = experts.build(layer(op=op, hidden=16), "cpu").run()
    shape = {"layer": (4, 16), "gate_up": (8, 32), "down": (8, 16)}.get(op)
    if shape:
        assert isinstance(found, torch.Tensor) and found.shape == shape
    with pytest.raises(NotImplementedError, match="equal shares"):
        experts.build(layer(local=2), "cpu")


def test_modules_counted_by_hand() -> None:
    """8 rows of 32 classes; an MLP of 3 products, whose weights are read, then read and written."""
    loss = Module(op="cross_entropy", direction="forward", rows=8, cols=32)
    assert module.bytes_moved(loss) == 8 * 32 * 4
    full = Module(op="cross_entropy", direction="full", rows=8, cols=32)
    assert module.bytes_moved(full) == 3 * 8 * 32 * 4
    mlp = Module(op="swiglu_mlp", direction="backward", rows=8, cols=32, inner=64)
    assert module.flops(mlp) == 2 * (3 * 2 * 8 * 32 * 64) + 5 * 8 * 32
    assert module.bytes_moved(mlp) == 4 * (4 * 8 * 32 + 2 * 3 * 32 * 64)


@pytest.mark.parametrize("op", OPS)
def test_both_directions_add_up_and_run(op: str) -> None:
    """Forward and backward make a full pass; each builds, with gradients of the module's inputs."""
    inner = 64 if op in module.MATRICES else 0
    p = {d: Module(op=op, direction=d, rows=16, cols=32, inner=inner) for d in DIRECTIONS}
    for formula in (module.flops, module.bytes_moved):
        assert formula(p["full"]) == formula(p["forward"]) + formula(p["backward"])
    for point in p.values():
        assert module.build(point, "cpu").run() is not None


def test_features_tell_directions_and_sizes_apart() -> None:
    a = Module(op="rope", direction="forward", rows=16, cols=32)
    b = Module(op="rope", direction="backward", rows=16, cols=64)
    found = [module.features(p, TOY) for p in (a, b)]
    assert [f["direction"] for f in found] == ["forward", "backward"]
    assert found[1]["log_elements"] - found[0]["log_elements"] == 1
    assert module.op_name(a) == "rope forward"
    skewed = experts.features(layer(skew=1.2), TOY)
    assert skewed["skew"] == 1.2


def test_a_cast_to_fp8_writes_one_byte() -> None:
    """bf16: 2 bytes read, 1 written."""
    p = elementwise.Elementwise(op="fp8_cast", numel=100, inner=100, dtype="bf16")
    assert elementwise.bytes_moved(p) == 300
