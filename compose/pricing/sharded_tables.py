"""Chooses where the tables of a captured step go, and the rank whose step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compose.graph.identity_cache import cached_by_identity
from compose.graph.rewrite import fresh_storages
from compose.parallel.captured_tables import CapturedTable, Lookup, captured_tables
from compose.parallel.greedy import greedy
from compose.parallel.placement import (
    Placement,
    Shard,
    Sharding,
    check_sharding,
    from_torchrec,
    memory_bytes,
)
from compose.parallel.plan import GREEDY, ParallelPlan
from compose.parallel.tables import held_shards, lookup_calls, rank_step
from compose.pricing.collectives import Cluster
from compose.pricing.optimizer import STATE_COPIES
from compose.pricing.price_book import PriceBook, priceable
from microbench.opcall import StepCapture

PARTS = (1, 2, 4, 8)  # columns that greedy cuts costly tables into
Held = Sequence[tuple[Shard, Lookup]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRank:
    """The step of the rank that spends most on its shards, and what else the fullest one holds."""

    step: StepCapture
    added_bytes: Mapping[str, int]


def slowest_rank(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, where: Cluster
) -> ShardedRank:
    """The slowest rank of a plan with ``shard``; ValueError where it does not fit the tables."""
    text = None if plan.shard == GREEDY else _text(plan)
    per_node, rate = where.groups["dp"].per_node, where.slowest_bytes_per_s("dp")
    try:
        return _slowest_rank(capture, text, plan.dp, per_node, rate, book)
    except ValueError as exc:
        raise ValueError(f"plan {str(plan)!r}: {exc}") from None


def _text(plan: ParallelPlan) -> str:
    try:
        return Path(plan.shard).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        reason = " ".join(str(exc).split())[:120]
        raise ValueError(f"plan {str(plan)!r}: shard is {GREEDY} or a file: {reason}") from None


@cached_by_identity
def _slowest_rank(
    capture: StepCapture, text: str | None, ranks: int, per_node: int, rate: float, book: PriceBook
) -> ShardedRank:
    """The slowest rank under the sharding of a text in torchrec's form; greedy where it is None.

    ``rate``: bytes/s of a rank's slowest link to others.
    """
    tables = captured_tables(capture)
    if not tables:
        raise ValueError("shard spreads embedding tables, and the model has none")
    state = float(STATE_COPIES[capture.optimizer])
    if text is not None:
        sharding = from_torchrec(text, [t.table for t in tables])
        check_sharding(sharding, [t.table for t in tables], ranks, per_node)
    else:
        sharding = greedy_sharding(capture, tables, ranks, per_node, rate, book, state)
    held = held_shards(tables, sharding, per_node)
    rank = int(np.argmax(_rank_us(capture, held, ranks, rate, book)))
    spread = [p.kind != "data_parallel" for p in sharding]
    shared = [t.table for t, s in zip(tables, spread, strict=True) if s]
    placed = tuple(p for p, s in zip(sharding, spread, strict=True) if s)
    weights = memory_bytes(placed, shared, 0.0, ranks, per_node)
    on_cpu = book.gpu.kind == "cpu"
    return ShardedRank(
        step=rank_step(capture, tables, sharding, rank, ranks, per_node, on_cpu=on_cpu),
        added_bytes={
            "parameters": max(weights) - weights[rank],
            "optimizer": round(state * max(weights)),
        },
    )


def greedy_sharding(
    capture: StepCapture,
    tables: Sequence[CapturedTable],
    ranks: int,
    per_node: int,
    rate: float,
    book: PriceBook,
    state: float,
) -> Sharding:
    """Tables spread greedily by time of lookups and messages, whole or costly ones in columns.

    Of these the one whose slowest rank takes least, among those that fit the memory if any do.
    """
    listed, limit_bytes = [t.table for t in tables], book.gpu.hbm_bytes
    alone = tuple(Placement("table_wise", (i,)) for i in range(len(tables)))
    costs = _rank_us(capture, held_shards(tables, alone, per_node), ranks, rate, book, len(tables))
    best: tuple[tuple[bool, float], Sharding] | None = None
    for parts in PARTS:
        found = greedy(listed, costs.tolist(), ranks, limit_bytes, state, min(parts, ranks))
        used = max(memory_bytes(found, listed, state, ranks, per_node))
        slowest_us = _rank_us(
            capture, held_shards(tables, found, per_node), ranks, rate, book
        ).max()
        score = (used > limit_bytes, float(slowest_us))
        if best is None or score < best[0]:
            best = (score, found)
    return best[1] if best else ()


def _rank_us(
    capture: StepCapture, held: Held, ranks: int, rate: float, book: PriceBook, count: int = 0
) -> np.ndarray:
    """Time in us of the lookups, updates and messages of each rank's shards.

    Of ``count`` ranks if given. A rank sends pooled vectors of the other ranks' samples, and
    receives as many bytes of gradients, at ``rate`` bytes/s.
    """
    ids, found = fresh_storages(capture), np.zeros(count or ranks)
    spread = [(s, x) for s, x in held if not s.local]
    calls = [lookup_calls(s, x, ranks, capture.optimizer, ids) for s, x in spread]
    priced = iter(book.price([priceable(c, 1.0) for f, back in calls for c in (f, *back)]))
    for (shard, lookup), (_, back) in zip(spread, calls, strict=True):
        for _ in range(1 + len(back)):
            op = next(priced)
            found[shard.rank] += max(op.duration_us, op.launch_us or 0.0)
        bytes_of_number = lookup.table.row_bytes / lookup.table.dim
        sent = (ranks - 1) * lookup.samples * shard.columns * bytes_of_number
        found[shard.rank] += 2 * 1e6 * sent / rate
    return found
