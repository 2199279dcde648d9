"""Tables in host memory or on an SSD: rows that a step fetches, by hand, and laws over tiers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from itercast.compose.capture_model import capture
from itercast.compose.predict import predict
from itercast.compose.pricing.tiers import EVICT, FETCH, tier_us
from itercast.compose.target import find_target
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.lookups.reuse import rows_outside
from itercast.extras.recommenders.sharded_model import RankingModel, Shard, Table
from itercast.extras.recommenders.sharding.forecast import Forecaster
from itercast.extras.recommenders.sharding.propose import choose
from itercast.extras.recommenders.sharding.tables import model_from
from itercast.extras.recommenders.tables.captured import Lookup
from itercast.extras.recommenders.tables.fetched_rows import moved_bytes
from itercast.extras.recommenders.tables.known_streams import with_indices
from itercast.extras.recommenders.tables.placement import (
    KERNELS,
    Placement,
    from_torchrec,
    memory_bytes,
    to_torchrec,
)
from itercast.microbench.hardware.spec import load_gpu

A100 = "a100-sxm-80gb"
TABLE = Table(name="t", rows=1_000_000, dim=32, pooling=4)  # rows of 128 bytes


def shard(tier: str, cached: float, rows: int = TABLE.rows, columns: int = 32) -> Shard:
    return Shard(0, 0, 0, rows, 0, columns, False, tier, cached)


def moved(tier: str, cached: float, table: Table = TABLE, optimizer: str = "sgd") -> dict:
    """Bytes of a lookup of 1,000 samples."""
    held = [(shard(tier, cached), Lookup(call=0, samples=1000, table=table))]
    return moved_bytes(held, 1, optimizer)


def test_a_cache_of_a_quarter_of_uniform_rows_leaves_three_quarters_to_fetch() -> None:
    """4,000 lookups in 1,000,000 rows touch 1e6 * (1 - exp(-0.004)) = 3,992 rows; 3/4: 2,994."""
    rows = 0.75 * 1e6 * -np.expm1(-0.004)
    found = moved("uvm", 0.25)
    assert found == pytest.approx({("uvm", FETCH): 128 * rows, ("uvm", EVICT): 128 * rows})
    adam = moved("uvm", 0.25, optimizer="adamw")  # two numbers of state move with each weight
    assert adam["uvm", FETCH] == pytest.approx(3 * 128 * rows)
    assert moved("uvm", 0.25, optimizer="none") == pytest.approx({("uvm", FETCH): 128 * rows})
    assert moved("uvm", 0.0)["uvm", FETCH] == 128 * 4000  # without a cache, at every lookup
    assert moved("uvm", 1.0) == moved("hbm", 1.0) == {}


def test_rows_that_a_batch_looks_up_often_are_cached_first() -> None:
    """50 of 1,000 rows once and 50 twice: a cache of 525 has these, and half of the other 950."""
    p = EmbeddingBag(
        op="forward", rows=1000, dim=8, bags=10, lookups=150, unique=100, reuse="0.5 0.5"
    )
    assert rows_outside(p, 525).item() == pytest.approx(25)
    assert rows_outside(p, 25).item() == pytest.approx(25 + 50)  # half of those looked up twice
    assert rows_outside(p, 0).item() == pytest.approx(100)


def test_times_are_bytes_over_pcie_or_reads_of_a_drive() -> None:
    """An A100 has 31.5 GB/s, of which rows reach 78 %; a drive 1.5 million reads a second."""
    gpu = load_gpu(A100)
    assert tier_us("uvm", FETCH, 24.57e3, gpu) == pytest.approx(1.0)
    found = moved("ssd", 0.25)
    rows = 0.75 * 1e6 * -np.expm1(-0.004)
    fetched_us = tier_us("ssd", FETCH, found["ssd", FETCH], gpu)
    assert fetched_us == pytest.approx(rows / 1.5)  # 4 KiB at 7 GB/s would be less
    assert found["ssd", EVICT] == pytest.approx(4096 * rows)
    with pytest.raises(ValueError, match="no pcie_bytes_per_s, which tables in uvm need"):
        tier_us("uvm", FETCH, 1.0, replace(gpu, pcie_bytes_per_s=0.0))


def test_tiers_are_written_and_read_in_torchrecs_form() -> None:
    places = (
        Placement("table_wise", (0,)),
        Placement("table_wise", (1,), "uvm", 0.25),
        Placement("row_wise", (0, 1), "uvm", 0.0),
        Placement("table_wise", (1,), "ssd", 0.1),
    )
    tables = [replace(TABLE, name=f"t{i}") for i in range(4)]
    text = to_torchrec(places, tables, 2, "cuda")
    assert from_torchrec(text, tables) == places
    kernels = [entry["compute_kernel"] for entry in json.loads(text).values()]
    assert kernels == ["fused", "fused_uvm_caching", "fused_uvm", "key_value"]
    assert set(kernels) < set(KERNELS)
    size = TABLE.nbytes  # of which rank 1 holds a quarter and a tenth, with as much state
    assert memory_bytes(places, tables, 1.0, 2, 2) == [2 * size, round(2 * size * 0.35)]
    for wrong, said in (
        ('"fused_uvm_caching"', "compute_kernel 'quick'; known: fused"),
        ("0.25", "load_factor is from 0 to 1, got 7"),
    ):
        bad = text.replace(wrong, '"quick"' if wrong.startswith('"') else "7", 1)
        with pytest.raises(ValueError, match=said):
            from_torchrec(bad, tables)


def large(rows: int) -> RankingModel:
    """Three tables with 64 columns, one of them of popular rows."""
    tables = [
        {"name": n, "rows": rows, "pooling": 20, "indices": i}
        for n, i in (("a", "uniform"), ("b", "zipf:1.1"), ("c", "uniform"))
    ]
    return model_from({"batch": 4096, "dim": 64, "tables": tables})


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_that_no_gpu_memory_holds_go_to_the_host_popular_rows_last(ranks: int) -> None:
    """Three of 102 GB on one or two A100: caches of popular rows are smaller and miss less."""
    forecaster = Forecaster(large(400_000_000), find_target(A100, f"dp={ranks}"), ranks)
    best = choose(forecaster)[0][1]
    assert best.fits and max(best.memory_bytes) > 0.5 * forecaster.room_bytes
    cached = {t: p.cached for t, p in zip("abc", best.sharding, strict=True)}
    assert cached["b"] == min(cached.values()) and min(cached.values()) < 1
    steps = forecaster.steps_us(best.sharding)
    assert steps["fetch rows"] > 0
    assert sum(steps.values()) == pytest.approx(best.iteration_us)


def test_a_plan_says_where_tables_lie() -> None:
    """More in host memory takes longer and less of the GPU's; an SSD takes longest."""
    plans = ("", ",tables=uvm:0.5", ",tables=uvm:0.1", ",tables=uvm", ",tables=ssd")
    found = [predict("dlrm-ddp", gpu=A100, plan=f"dp=4,shard=greedy{p}") for p in plans]
    times = [f.iteration_us for f in found]
    assert times == sorted(times) and len(set(times)) == 5
    memory = [f.memory_bytes for f in found[:4]]
    assert memory == sorted(memory, reverse=True) and len(set(memory)) == 4
    alone = predict("dlrm-ddp", gpu=A100, plan="shard=greedy,tables=uvm:0.1")
    assert "tiers.pcie_frac" in alone.assumed_by_us


class Features(nn.Module):
    """Features of vertices, which are not trained, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Embedding(1_000_000, 32)
        self.features.weight.requires_grad_(requires_grad=False)
        self.top = nn.Linear(32, 8)

    def forward(self, vertices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.features(vertices))
        return out


def test_frozen_features_are_fetched_for_distinct_vertices() -> None:
    """50,000 distinct vertices, a tenth cached: 45,000 rows of 128 bytes take 234 us over PCIe."""
    step = capture(Features(), torch.zeros(50_000, dtype=torch.int64), lambda x: x.sum())
    step = with_indices(step, "zipf:0:distinct")
    whole = predict(step, gpu=A100)
    found = predict(step, gpu=A100, plan="tables=uvm:0.1")
    assert found.exposed_comm_us == pytest.approx(45_000 * 128 / 24.57e3, rel=1e-3)
    assert whole.memory_bytes - found.memory_bytes == 0.9 * 128e6
    hot = predict(with_indices(step, "zipf:0.9:distinct"), gpu=A100, plan="tables=uvm:0.1")
    assert hot.exposed_comm_us < found.exposed_comm_us
    with pytest.raises(ValueError, match="no table of the model is frozen"):
        predict("dlrm-s", gpu=A100, plan="tables=uvm:0.1")
