"""Mixtures of experts, which libraries run as a whole: pairs, loads and times by hand."""

import pytest

from itercast.extras.published import experts
from itercast.extras.published.expert_loads import DRAWS, busiest_loads
from itercast.extras.published.experts import Experts
from itercast.microbench.hardware.spec import Gpu

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
