"""Mixtures of experts, which libraries run as a whole: pairs, loads and times by hand."""

from __future__ import annotations

import numpy as np
import pytest

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.matrix import experts
from itercast.microbench.ops.matrix.expert_loads import DRAWS, busiest_loads
from itercast.microbench.ops.matrix.experts import Experts

TOY = Gpu(name="toy", sm_count=4, peak_flops_per_s={"fp32": 1e12})


def layer(**changes: object) -> Experts:
    """Four tokens of 8 numbers, each to 2 of 4 experts of width 16, all on one rank."""
    sizes = {"tokens": 4, "hidden": 8, "inner": 16, "experts": 4, "topk": 2, "local": 4}
    return Experts(**{"op": "layer", **sizes, **changes})  # type: ignore[arg-type]


def test_ranks_wait_for_the_one_with_the_popular_experts() -> None:
    """Each rank of one expert: the busiest has more than its share, and no more than all tokens.

    Where all are as popular, 6 tokens x 2 over 4 experts are 3 each, on any rank.
    """
    assert busiest_loads(6, 4, 2, 2, 0.0).tolist() == [[3.0, 3.0]]
    shares = [experts.pairs(layer(tokens=512, experts=16, local=n, skew=1.2)) for n in (1, 4, 16)]
    assert shares[-1] == pytest.approx(512 * 2)
    assert shares[0] > 3 * 512 * 2 / 16 and shares[0] <= 512
    assert shares[0] < shares[1] < shares[2]
    loads = busiest_loads(512, 16, 2, 4, 1.2)
    assert loads.shape == (DRAWS, 4) and loads.max() <= 512
    assert loads.sum(1).mean() == pytest.approx(shares[1])


@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_experts_take_longer_with_more_tokens_and_more_experts(skew: float) -> None:
    """More experts at the same tokens never read fewer weights; more tokens use up to all."""
    by_tokens = [layer(tokens=2**n, experts=16, local=16, skew=skew) for n in range(12)]
    times = [float(experts.floor_us(p, TOY)) for p in by_tokens]
    assert times == sorted(times)
    by_experts = [layer(tokens=256, experts=n, local=n, skew=skew) for n in (4, 8, 16, 64)]
    used = [float(experts.used(p)) for p in by_experts]
    assert used == sorted(used) and used[0] == pytest.approx(4, rel=0.1)
    few = [experts.used(layer(tokens=n)) for n in (1, 2, 8, 64)]
    assert few == sorted(few) and few[0] == 2 and few[-1] == pytest.approx(4)


def test_time_of_experts_kernel_by_kernel() -> None:
    """8 pairs in 4 tiles of 16 rows; bytes and flops of the product down, by hand."""
    fast = Gpu(name="fast", sm_count=4, peak_flops_per_s={"fp32": 1e6}, hbm_bytes_per_s=1e30)
    tiles = 3.75  # each expert gets a token with a chance of 15 / 16
    flops_us = 2 * tiles * 16 * 8 * 16
    assert experts.floor_us(layer(op="down"), fast) == pytest.approx(flops_us + experts.KERNEL_US)
    slow = Gpu(name="slow", sm_count=4, peak_flops_per_s={"fp32": 1e30}, hbm_bytes_per_s=1e6)
    moved = 4 * (3.75 * 8 * 16 + 8 * 16 + 8 * 8)  # weights, pairs in, pairs out
    assert experts.floor_us(layer(op="down"), slow) == pytest.approx(moved + experts.KERNEL_US)
    whole = experts.floor_us(layer(), slow)
    assert whole > experts.floor_us(layer(op="gate_up"), slow) + moved
    with pytest.raises(NotImplementedError, match="imported"):
        experts.build(layer(), "cpu")


def test_features_are_shares_of_the_time_and_of_tiles() -> None:
    """Widths twice as large move the shares and the waves, not the tokens of an expert."""
    found = experts.features(layer(skew=1.2), TOY)
    assert found["skew"] == 1.2
    named = ("weights", "tokens", "inner", "products")
    assert sum(2 ** float(found[f"log_{n}_frac"]) for n in named) == pytest.approx(1)
    even, wide = (experts.features(layer(inner=n), TOY) for n in (64, 128))
    assert even["log_each"] == wide["log_each"] == pytest.approx(np.log2(8 / 3.75))
    assert 2.0 ** even["log_fill_16x64"] == pytest.approx(3.75 * 16 / 8)  # four tiles, eight pairs
    assert wide["log_waves_16x64"] == even["log_waves_16x64"] + 1
