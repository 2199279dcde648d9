"""The catalogue of models: what their steps call, which points are drawn, what is held out."""

from typing import Any

import numpy as np
import pytest
import torch

from itercast.capture.cases.kinds import make_case
from itercast.extras.campaign.catalogue import FACTS, Model, drawn_points, points_of_models
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.step.optimizer import OptimizerOp

H100 = load_gpu("h100-sxm-80gb")
SMALL: dict[str, Any] = {
    "width": 64,
    "layers": 5,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 96,
    "vocab": 128,
}


def small(name: str = "a small one") -> Model:
    return Model(name=name, kind="llama", sizes=SMALL, runs=((2, 16),))


def test_equal_layers_count_as_often_as_there_are_layers() -> None:
    """Five layers: as those of the whole model, its parameters all in one list."""
    found = small().calls(2, 16, "bf16")
    attention = {p.op: n for (_, p), n in found.items() if isinstance(p, Attention)}
    assert attention == {"forward": 5, "backward": 5}
    down = Gemm(op="mm", m=32, n=64, k=96, layout="nt", dtype="bf16")
    assert found["gemm", down] == 5
    with torch.device("meta"):
        whole = make_case("whole", "llama", batch=2, seq=16, **SMALL).build()
    sizes = [p.numel() for p in whole.parameters()]
    updates = [p for _, p in found if isinstance(p, OptimizerOp) and p.numel > p.tensors]
    assert {(p.tensors, p.numel) for p in updates} == {(len(sizes), sum(sizes))}


def test_calls_are_drawn_by_their_time_and_a_quarter_lies_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two products the one that takes nearly all of the time is drawn where one is."""
    large, tiny = (Gemm(m=n, n=n, k=n, dtype="bf16") for n in (4096, 4080))
    us = {("gemm", large): 1e6, ("gemm", tiny): 1e-3}
    monkeypatch.setitem(FACTS, "counts", {"gemm": 1, "norm": 4})
    monkeypatch.setitem(FACTS, "around_frac", 0.0)
    assert [drawn_points(us, H100, seed) for seed in range(9)] == [{"gemm": {large: large}}] * 9
    monkeypatch.setitem(FACTS, "counts", {"gemm": 200})
    monkeypatch.setitem(FACTS, "around_frac", 0.25)
    drawn = drawn_points(us, H100, 0)["gemm"]
    assert (drawn[large], drawn[tiny]) == (large, tiny)
    near = [p for p in drawn if p not in (large, tiny)]
    assert {drawn[p] for p in near} == {large, tiny}
    assert 40 <= len(near) <= 50
    odd = np.mean([any(side % 8 for side in (p.m, p.n, p.k)) for p in near])
    assert 0.1 < odd < 0.6


def test_a_model_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken = Model(name="broken", kind="llama", sizes={**SMALL, "heads": 5}, runs=((2, 16),))
    found = points_of_models(H100, 0, [broken, small()])
    assert "broken" in caplog.text
    assert found.keys() >= {"gemm", "attention", "optimizer"}
    assert {tuple(models) for models in found["gemm"].values()} == {("a small one",)}
