"""The search among shardings: near the best of all, for any kind of placement."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from itercast.compose.parallel.table_work import held_shards, traffic
from itercast.compose.sharding.forecast import Forecaster
from itercast.compose.sharding.propose import choose, improve, random_sharding
from itercast.compose.sharding.tables import RankingModel
from itercast.compose.tables.placement import Placement, Sharding, Table, check_sharding
from itercast.compose.target import find_target


def model(count: int, seed: int, batch: int = 1024) -> RankingModel:
    """Tables of many lookups beside a small dense part."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(3, 5.3)),
            dim=32,
            pooling=int(rng.integers(1, 60)),
        )
        for i in range(count)
    )
    return RankingModel(batch=batch, tables=tables, bottom=(64,), top=(64,))


def forecaster_of(wanted: RankingModel, gpu: str, ranks: int) -> Forecaster:
    return Forecaster(wanted, find_target(gpu, f"dp={ranks}"), ranks)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_within_1_percent_of_the_best_of_all(seed: int) -> None:
    """Eight whole tables on two ranks: 2^7 shardings, since ranks may be swapped."""
    forecaster = forecaster_of(model(8, seed), "cpu", 2)
    every = [
        forecaster.forecast(tuple(Placement("table_wise", (r,)) for r in (0, *others)))
        for others in product((0, 1), repeat=7)
    ]
    best_us = min(f.iteration_us for f in every)
    found = dict(choose(forecaster))["search"]
    assert found.iteration_us <= 1.01 * best_us
    assert max(f.iteration_us for f in every) > 1.3 * best_us  # it matters


def test_the_search_only_gets_better_and_its_shardings_are_legal() -> None:
    """On two nodes of eight, where rows within a node and grids are tried too."""
    forecaster = forecaster_of(model(12, 0, batch=8192), "h100-sxm-80gb", 16)
    start = forecaster.forecast(random_sharding(np.random.default_rng(0), forecaster.model, 16))
    found = improve(start, forecaster)
    check_sharding(found.sharding, forecaster.model.tables, 16, forecaster.per_node)
    assert forecaster.per_node == 8 and found.iteration_us < start.iteration_us


def test_the_search_finds_room_in_memory() -> None:
    """Four tables of 38 GB, all on one GPU of 80 GB; two a GPU fit."""
    small = model(4, 0, batch=64)
    huge = replace(small, tables=tuple(replace(t, rows=300_000_000) for t in small.tables))
    forecaster = forecaster_of(huge, "h100-sxm-80gb", 4)
    crowded = forecaster.forecast(tuple(Placement("table_wise", (0,)) for _ in range(4)))
    assert not crowded.fits and improve(crowded, forecaster).fits


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard", "row_wise"])
def test_cuts_over_nodes_send_less_beyond_the_node_than_rows_over_all(kind: str) -> None:
    """One table over two nodes of eight: each rank of a grid returns half of the columns.

    Pooled vectors of 4,096 samples and 32 floats: rows over 16 ranks make 16 partial sums of them,
    a grid of two halves 8, one node's ranks 8.
    """
    one = model(1, 0, batch=4096)
    ranks = {"table_row_wise": tuple(range(8))}.get(kind, tuple(range(16)))
    sharding: Sharding = (Placement(kind, ranks),)
    forecaster = forecaster_of(one, "h100-sxm-80gb", 16)
    sums = {"row_wise": 16, "grid_shard": 8, "table_row_wise": 8}[kind]
    sent = traffic(held_shards(forecaster.tables, sharding, 8), 16)
    assert sent["vectors"][1, 0] == sums * 4096 * 32 * 4
    assert forecaster.forecast(sharding).iteration_us > 0
