"""Prices of shards: real ops of the named optimizer, caches between two uses, shared cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from itercast.compose.parallel.placement import Placement, Table
from itercast.compose.pricing.host import host_cost
from itercast.compose.sharding.costs import Costs, _touched_bytes
from itercast.compose.sharding.forecast import forecast_sharding, sharing_cores, traffic
from itercast.compose.sharding.tables import RankingModel
from itercast.compose.target import find_target
from itercast.learners.bundle import SHIPPED_CPU

TABLE = Table(name="t", rows=1000, dim=16, pooling=2.0)
MODEL = RankingModel(batch=8, tables=(TABLE,), features=4, bottom=(8,), top=(8,))


def costs(model: RankingModel, ranks: int = 2) -> Costs:
    return Costs(model, find_target("cpu", f"dp={ranks}", SHIPPED_CPU), ranks)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_a_shard_is_priced_by_the_ops_that_run(optimizer: str) -> None:
    """2 ranks * 8 samples * 2 lookups: a lookup, its sparse gradient, the optimizer's step."""
    found = costs(replace(MODEL, optimizer=optimizer))
    forward, gradient, update = found._ops(0, 1000, 16, False)
    assert [o.params.op for o in (forward, gradient, update)] == [
        "forward",
        "sparse_backward",
        optimizer,
    ]
    assert update.family is not None and update.family.name == "sparse_update"
    assert (update.params.rows, update.params.dim, update.params.lookups) == (1000, 16, 32)


def test_a_cpu_runs_a_rank_s_tables_one_after_the_other() -> None:
    """Four tables on two ranks: two in a row, whose rows have left the core's caches."""
    four = replace(MODEL, tables=4 * (TABLE,))
    found = costs(four, 2)
    forward, gradient, update = found._ops(0, 1000, 16, False)
    assert [o.params.tables for o in (forward, gradient, update)] == [2, 2, 2]
    assert [o.cold for o in (forward, gradient, update)] == [1.0, 1.0, 1.0]
    local = found._ops(0, 1000, 16, True)
    assert local[0].params.tables == 1
    on_gpu = Costs(four, find_target("a100-sxm-80gb", "dp=2"), 2)
    assert on_gpu._ops(0, 1000, 16, False)[0].params.tables == 1


def test_the_tables_own_backward_and_optimizer_cost_host_time_once() -> None:
    """A backward pass and a step of SGD on the rank that holds the table; none on a GPU."""
    found = costs(MODEL)
    assert found.update_host_us == pytest.approx(
        host_cost({"backward": 1, "sgd_step": 0}, found.book).duration_us
    )
    place = (Placement("table_wise", (1,)),)
    with_host = traffic(place, found).backward_us
    found.update_host_us = 0.0
    assert (with_host - traffic(place, found).backward_us).tolist() == pytest.approx(
        [0.0, host_cost({"backward": 1}, found.book).duration_us]
    )
    assert Costs(MODEL, find_target("a100-sxm-80gb", "dp=2"), 2).update_host_us == 0.0


def test_a_cpu_copies_what_it_receives() -> None:
    """Gradients twice: by rank, and into one message; vectors once. A GPU's kernels do without."""
    found, on_gpu = costs(MODEL), Costs(MODEL, find_target("a100-sxm-80gb", "dp=2"), 2)
    assert found.rearranging_us("gradients", 4096.0) == 2 * found.copy_us(4096.0) > 0
    assert found.rearranging_us("joined", 4096.0) == found.copy_us(4096.0)
    assert on_gpu.rearranging_us("gradients", 4096.0) == 0.0
    place = (Placement("table_wise", (1,)),)
    with_copies = forecast_sharding(place, found).iteration_us
    found.rearranging_us = lambda part, nbytes: 0.0  # type: ignore[method-assign]
    assert forecast_sharding(place, found).iteration_us < with_copies


def test_bytes_between_two_uses_by_hand() -> None:
    """All 2 rows of 64 bytes, and a gradient of 32 rows written and read, over two ranks."""
    small = replace(MODEL, tables=(replace(TABLE, rows=2),))
    assert _touched_bytes(small, 2) == pytest.approx((2 * 64 + 2 * 32 * 64) / 2, rel=1e-3)


def test_ranks_share_cores_evenly() -> None:
    """Four ranks on two cores: two at a time run at half speed until one is done."""
    work = np.array([1.0, 1.0, 1.0, 1.0])
    assert sharing_cores(work, 4).tolist() == [1.0] * 4
    assert sharing_cores(work, 2).tolist() == [2.0] * 4
    # all until 1 * 4/2 = 2; then three have 1 left: 2 + 1 * 3/2
    assert sharing_cores(np.array([2.0, 1.0, 2.0, 2.0]), 2).tolist() == [3.5, 2.0, 3.5, 3.5]
    assert sharing_cores(np.array([5.0, 0.0]), 1).tolist() == [5.0, 0.0]


def test_more_ranks_than_cores_are_slower() -> None:
    """Four ranks on two cores, each with its samples, take longer than two."""
    two, four = costs(MODEL, 2), costs(MODEL, 4)
    assert (two.ranks_at_once, four.ranks_at_once) == (2, 2)
    place = (Placement("table_wise", (0,)),)
    slow, fast = (forecast_sharding(place, c) for c in (four, two))
    assert slow.steps_us["top perceptron, both ways"] == pytest.approx(
        2 * fast.steps_us["top perceptron, both ways"], rel=0.01
    )
