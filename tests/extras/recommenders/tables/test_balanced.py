"""Greedy sharding that cuts tables: by hand, no rank above the mean, valid placements, memory."""

import numpy as np
import pytest

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.price_book import price_book
from itercast.compose.target import find_target
from itercast.extras.recommenders.sharded_model import Table
from itercast.extras.recommenders.tables.captured import captured_tables
from itercast.extras.recommenders.tables.greedy import Way, balanced, placements
from itercast.extras.recommenders.tables.placement import (
    Placement,
    Sharding,
    check_sharding,
    memory_bytes,
    shards,
)
from itercast.extras.recommenders.tables.shard_times import ShardTimes

UNLIMITED = 1e15


def work(table: Table) -> float:
    """Elements looked up for a sample."""
    return table.pooling * table.dim


def ways(table: Table, ranks: int, per_node: int) -> list[Way]:
    """A shard costs its part of the table's work: cuts cost nothing."""
    made = placements(table, ranks, per_node)
    return [Way(p, work(table) / len(p.ranks)) for p in made]


def loads(tables: list[Table], found: Sharding, ranks: int, per_node: int) -> np.ndarray:
    """Work of each rank, by the shards that it holds."""
    load = np.zeros(ranks)
    for i, (table, place) in enumerate(zip(tables, found, strict=True)):
        for s in shards(table, i, place, per_node):
            load[s.rank] += table.pooling * s.columns * s.rows / table.rows
    return load


def many(count: int, seed: int) -> list[Table]:
    """Tables of very different work."""
    rng = np.random.default_rng(seed)
    return [
        Table(name=str(i), rows=2**20, dim=128, pooling=float(n))
        for i, n in enumerate(np.ceil(rng.lognormal(1.0, 1.5, count)))
    ]


def test_a_table_is_cut_where_it_alone_holds_up_a_rank() -> None:
    """Work 4, 1, 1 on two ranks: whole tables give 4 and 2, halves of the first 3 and 3."""
    tables = [Table(name=n, rows=8, dim=8, pooling=p) for n, p in (("a", 4), ("b", 1), ("c", 1))]
    found = balanced(tables, [ways(t, 2, 2) for t in tables], 2, 2, UNLIMITED)
    assert [p.kind for p in found] == ["column_wise", "table_wise", "table_wise"]
    assert loads(tables, found, 2, 2).tolist() == [24, 24]


def test_a_cut_that_costs_more_than_it_spares_is_not_made() -> None:
    """Halves that cost 3 each would make the slowest rank 3 instead of 4, but 5 with another 2."""
    tables = [Table(name=n, rows=8, dim=8, pooling=1) for n in "abc"]
    whole, halves = Placement("table_wise", (0,)), Placement("column_wise", (0, 1))
    mine = [Way(whole, 4.0), Way(halves, 3.0)]
    found = balanced(tables, [mine, [Way(whole, 2.0)], [Way(whole, 2.0)]], 2, 2, UNLIMITED)
    assert [p.kind for p in found] == ["table_wise"] * 3


@pytest.mark.parametrize(("count", "ranks"), [(26, 8), (26, 64), (26, 128), (5, 16), (200, 64)])
def test_no_rank_has_much_more_than_the_mean_where_tables_can_be_cut(
    count: int, ranks: int
) -> None:
    tables = many(count, seed=0)
    found = balanced(tables, [ways(t, ranks, 8) for t in tables], ranks, 8, UNLIMITED)
    check_sharding(found, tables, ranks, 8)
    load = loads(tables, found, ranks, 8)
    assert load.sum() == pytest.approx(sum(map(work, tables)))
    assert load.max() <= 1.1 * load.mean()


def test_a_table_that_fits_no_rank_is_cut_though_that_costs_time() -> None:
    """8,192 bytes and a tenth of state on two ranks of 5,000: halves, though they are slower."""
    table = Table(name="a", rows=64, dim=32, pooling=1)
    mine = [Way(Placement("table_wise", (0,)), 1.0), Way(Placement("column_wise", (0, 1)), 0.9)]
    small = Table(name="b", rows=1, dim=32, pooling=1)
    last = [Way(mine[0].place, 1.0)]
    for limit_bytes, kind in ((10_000, "table_wise"), (5_000, "column_wise")):
        found = balanced([table, small], [mine, last], 2, 2, limit_bytes, state=0.1)
        assert found[0].kind == kind
        assert max(memory_bytes(found, [table, small], 0.1, 2, 2)) <= limit_bytes


def test_row_numbers_count_for_the_rank_that_holds_a_table() -> None:
    """MLPerf's table of 100 lookups a sample gets its row numbers on many ranks over a network.

    Cut in columns alone, each part would get all of them: 135,168 * 100 * 8 B at 50 GB/s are 2 ms.
    """
    ranks = 64
    plan = f"dp={ranks},node=dgx-h100"
    target = find_target("h100-sxm-80gb", plan)
    cluster = cluster_for(ParallelPlan.parse(plan), target.gpu, target.node)
    book = price_book(target.bundle, target.gpu, target.threads)
    step = capture("dlrm-dcnv2", batch=135_168 // ranks, dtype="fp16")
    tables = captured_tables(step)
    rate = cluster.slowest_bytes_per_s("dp")
    found = ShardTimes(tables, step.optimizer, ranks, 8, rate, book).greedy(0.0)
    (hot,) = [p for t, p in zip(tables, found, strict=True) if t.table.pooling == 100]
    assert hot.kind == "grid_shard" and len(hot.ranks) >= 16
