"""Recommendation models: published sizes, formulas by hand, small ones run and are forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from itercast.compose.predict import predict
from itercast.microbench.cases.recommenders.ranking import CrossNetwork, DeepFm
from itercast.microbench.cases.recommenders.sequences import Hstu
from itercast.microbench.cases.registry import case, cases_of
from itercast.microbench.step import StepSettings, make_step

BOTTOM = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
OVER = 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
CROSSED = 27 * 128  # dense features and 26 tables
ITEMS = 26_744  # of MovieLens 20M
NAMES = [c.name for c in cases_of("recommenders")]
PARAMETERS = {
    # bottom, top over 128 features and 351 products
    "dlrm-mlperf": 204_184_588 * 128 + BOTTOM + (128 + 351) * 1024 + 1024 + OVER,
    # bottom, three cross layers of rank 512, top
    "dlrm-dcnv2": 204_184_588 * 128
    + (BOTTOM + 3 * (2 * CROSSED * 512 + CROSSED) + CROSSED * 1024 + 1024 + OVER),
    # items, positions; layers: two norms, u v q k, output, biases of distances
    "hstu-large": ITEMS * 256 + 200 * 256 + 16 * (1024 + 256 * 1024 + 256 * 256 + 256 + 399),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = case(name).build()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_a_cross_layer_by_hand() -> None:
    """W = 2 I, b = 1: x * (2 x + 1) + x = 2 x^2 + 2 x; the second layer starts from its result."""
    net = CrossNetwork(1, 2)
    for up in net.up:
        up.weight.data.fill_(2.0)
        up.bias.data.fill_(1.0)
    assert net(torch.tensor([[3.0]])).item() == 3 * (2 * 24 + 1) + 24


def test_deepfm_sums_the_products_of_all_pairs() -> None:
    """Three tables, two columns: v0 v1 + v0 v2 + v1 v2, beside zero weights of all else."""
    model = DeepFm(features=1, rows=(4, 4, 4), pooling=(1, 1, 1), width=2, hidden=(3,))
    for name, p in model.named_parameters():
        if not name.startswith("tables"):
            p.data.zero_()
    index = torch.tensor([1, 2, 3])
    vectors = [bag.weight[i] for bag, i in zip(model.tables.bags, index, strict=True)]
    a, b, c = vectors
    found = model(torch.zeros(1, 1), index, torch.zeros(3, 1, dtype=torch.int64))
    torch.testing.assert_close(found[0], a @ b + a @ c + b @ c)


def test_hstu_does_not_look_ahead() -> None:
    model = Hstu(items=20, width=8, layers=2, heads=2, head=4, seq=5)
    history, candidates = torch.randint(0, 20, (1, 5)), torch.randint(0, 20, (1, 5, 3))
    changed = history.clone()
    changed[0, 4] = (history[0, 4] + 1) % 20
    before, after = model(history, candidates), model(changed, candidates)
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4], after[4])


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-s")])
def test_small_ones_train(name: str) -> None:
    """A step changes the parameters; sizes of the batch are those asked for."""
    chosen = case(name)
    torch.manual_seed(0)
    model, inputs = chosen.build(), chosen.inputs(4, chosen.seq)
    before = [p.detach().clone() for p in model.parameters()]
    make_step(model, inputs, chosen.loss, StepSettings(optimizer=chosen.optimizer))()
    assert any(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_all_are_forecast_alone_and_with_sharded_tables(name: str) -> None:
    """Nothing is allocated: the tables of MLPerf have 105 GB."""
    small: dict[str, Any] = {"gpu": "h100-sxm-80gb", "batch": 64}
    alone, sharded = (predict(name, plan=plan, **small) for plan in ("", "dp=4,shard=greedy"))
    assert 0 < alone.iteration_us < 1e7 and sharded.fits
    assert sharded.memory_by_bytes["parameters"] <= alone.memory_by_bytes["parameters"]


def test_sparse_tables_are_trained_by_sgd_unless_asked_for() -> None:
    """Adam refuses sparse gradients."""
    assert predict("dlrm-dcnv2", batch=8, gpu="h100-sxm-80gb").iteration_us > 0
    with pytest.raises(ValueError, match="sparse gradients"):
        predict("dlrm-dcnv2", batch=8, gpu="h100-sxm-80gb", optimizer="adamw")
