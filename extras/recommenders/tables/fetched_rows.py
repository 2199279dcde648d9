"""Rows of tables that lie in host memory (uvm) or on an SSD; the GPU's memory caches some of them.

The cache holds the rows that are looked up most. Before its lookups a step fetches the distinct
rows that the cache lacks. They are updated there; as many changed rows, with their optimizer
state, are written back to make room (FBGEMM's ``fused_uvm_caching``, ``key_value``). Without a
cache each lookup reads its row over PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, StepCapture, TensorSpec
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.rewrite import StepBuilder, collective
from itercast.compose.parallel.placement import SSD, TIERS
from itercast.compose.pricing.tiers import DRIVE, EVICT, FETCH, tier_us
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.lookups.reuse import expected_reuse, rows_outside
from itercast.extras.recommenders.sharded_model import Shard, Table, state_per_weight
from itercast.extras.recommenders.tables.captured import Lookup, captured_tables
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.store import Row

MOST_DRAWS, HALVINGS = 1e4, 40  # of a search for a number of draws
REQUEST_BYTES: int = assumed(__file__, "request_bytes")


def shard_stream(table: Table, rows: int, samples: int) -> Row:
    """Statistics of the row numbers looked up in a shard: parameters of ``EmbeddingBag`` by name.

    A shard with a part of the table's rows gets that part of its distinct rows.
    """
    facts = table.stream.facts(table.rows, samples) if table.pooled else {}
    if rows < table.rows and "unique" in facts:
        facts["unique"] = max(1, round(facts["unique"] * rows / table.rows))
    facts.pop("lookups", None)
    return facts


def draws_of(rows: int, unique: float, skew: float) -> float:
    """How many draws of the Zipf exponent are expected to have so many distinct rows."""
    low, high = np.log(max(1.0, unique)), np.log(MOST_DRAWS * max(1.0, unique))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        few = float(expected_reuse(rows, np.exp(middle), skew, 0.0)[0]) < unique
        low, high = (middle, high) if few else (low, middle)
    return float(np.exp(high))


def missed_rows(shard: Shard, lookup: Lookup, ranks: int) -> tuple[float, float]:
    """(rows, distinct rows) that lookups for the samples of all ranks read from a shard's tier."""
    table, samples = lookup.table, lookup.samples_of(shard, ranks)
    looked_up = max(1, round(samples * table.pooling * shard.rows / table.rows))
    facts = shard_stream(table, shard.rows, samples) or {"skew": table.stream.skew}
    if table.stream.distinct:
        looked_up = round(draws_of(shard.rows, looked_up, table.stream.skew))
    p = EmbeddingBag(
        op="forward", rows=shard.rows, dim=shard.columns, bags=samples, lookups=looked_up, **facts
    )
    missed = rows_outside(p, shard.cached * shard.rows).item()
    return (missed if shard.cached or table.stream.distinct else float(looked_up)), missed


def moved_bytes(
    held: Sequence[tuple[Shard, Lookup]], ranks: int, optimizer: str
) -> dict[tuple[str, str], float]:
    """Bytes between a GPU and its tiers, by tier and kind, as they stream.

    More are counted than rows have, so that streaming takes as long as reading them does: rows in
    host memory are read in whole requests, rows on an SSD in whole blocks, at a limited rate.
    """
    moved = dict[tuple[str, str], float]()
    for shard, lookup in held:
        if shard.tier not in TIERS:
            continue
        read, written = missed_rows(shard, lookup, ranks)
        weights = shard.columns * ITEMSIZE_BYTES[lookup.table.dtype]
        trained = optimizer != "none" and not shard.local
        row_bytes = weights * (1 + state_per_weight(optimizer) if trained else 1)
        for kind, rows in ((FETCH, read), (EVICT, written if trained else 0.0)):
            unit = DRIVE["block_bytes"] if shard.tier == SSD else REQUEST_BYTES
            nbytes = unit * ceil(row_bytes / unit)
            if shard.tier == SSD and kind == FETCH:
                nbytes = max(nbytes, DRIVE["read_bytes_per_s"] / DRIVE["reads_per_s"])
            if rows:
                key = (shard.tier, kind)
                moved[key] = moved.get(key, 0.0) + rows * nbytes
    return moved


def fetched_us(held: Sequence[tuple[Shard, Lookup]], ranks: int, optimizer: str, gpu: Gpu) -> float:
    """Time in us to move the rows of shards to and from their tiers."""
    moved = moved_bytes(held, ranks, optimizer)
    return sum(tier_us(tier, kind, nbytes, gpu) for (tier, kind), nbytes in moved.items())


@cached_by_identity
def with_frozen_tables_in(
    capture: StepCapture, tier: str, cached: float
) -> tuple[StepCapture, dict[str, int]]:
    """The step with its frozen tables in a tier, and by how many bytes that lowers its memory.

    Each lookup first fetches rows that the cache lacks. Such tables hold features of vertices.
    """
    tables = [t for t in captured_tables(capture) if t.parameter.ready_after < 0]
    if not tables:
        raise ValueError(f"tables={tier}: no table of the model is frozen; trained ones need shard")
    fetches: dict[int, float] = {}
    for number, t in enumerate(tables):
        for x in t.lookups:
            place = (0, x.table.rows, 0, x.table.dim, True, tier, cached)
            moved = moved_bytes([(Shard(number, 0, *place), x)], 1, "none")
            fetches[x.call] = sum(moved.values())
    made = StepBuilder(capture)
    for i, call in enumerate(capture.calls):
        if nbytes := round(fetches.get(i, 0.0) / 4):
            rows = TensorSpec(shape=(nbytes,), dtype="fp32", storage=-1)  # no memory holds them
            made.calls.append(replace(collective(FETCH, tier, rows, ""), phase=call.phase))
        made.add(i, call)
    outside = sum(round((1 - cached) * t.parameter.nbytes) for t in tables)
    return made.step(), {"parameters": -outside}
