"""Chooses where the tables of a captured step go, and the rank whose step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.rewrite import fresh_storages
from itercast.compose.parallel.batched_tables import BatchedStep, as_stored, batched_calls
from itercast.compose.parallel.captured_tables import CapturedTable, Lookup, captured_tables
from itercast.compose.parallel.greedy import Way, balanced, placements
from itercast.compose.parallel.placement import (
    Shard,
    Sharding,
    check_sharding,
    from_torchrec,
    memory_bytes,
    message_bytes,
    shards,
)
from itercast.compose.parallel.plan import GREEDY, ParallelPlan
from itercast.compose.parallel.tables import RankStep, held_shards, lookup_calls, rank_step
from itercast.compose.pricing.collectives import Cluster
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.pricing.price_book import PriceBook, priceable
from itercast.microbench.hardware.stack import TableSoftware, stack_of_row
from itercast.microbench.opcall import StepCapture

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
    software = _software(book)
    tables = as_stored(captured_tables(capture), software)
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
    kind = BatchedStep if software.batched else RankStep
    spread = [kind.batched or p.kind != "data_parallel" for p in sharding]
    shared = [t.table for t, s in zip(tables, spread, strict=True) if s]
    placed = tuple(p for p, s in zip(sharding, spread, strict=True) if s)
    weights = memory_bytes(placed, shared, 0.0, ranks, per_node)
    on_cpu = book.gpu.kind == "cpu"
    return ShardedRank(
        step=rank_step(capture, tables, sharding, rank, ranks, per_node, on_cpu=on_cpu, kind=kind),
        added_bytes={
            "parameters": max(weights) - weights[rank],
            "optimizer": round(state * max(weights)),
        },
    )


def _software(book: PriceBook) -> TableSoftware:
    """How the forecast stack looks tables up; on a CPU as torch does."""
    return TableSoftware() if book.gpu.kind == "cpu" else stack_of_row(book.stack).tables


def greedy_sharding(
    capture: StepCapture,
    tables: Sequence[CapturedTable],
    ranks: int,
    per_node: int,
    rate: float,
    book: PriceBook,
    state: float,
) -> Sharding:
    """Tables spread by the time of their lookups and messages, costly ones in columns and rows."""
    listed = [t.table for t in tables]
    ways = _ways(capture, tables, ranks, per_node, rate, book)
    return balanced(listed, ways, ranks, per_node, book.gpu.hbm_bytes, state)


def _ways(
    capture: StepCapture,
    tables: Sequence[CapturedTable],
    ranks: int,
    per_node: int,
    rate: float,
    book: PriceBook,
) -> list[list[Way]]:
    """The ways to place each table with the time in us that the first shard adds to a rank."""
    copies = _software(book).batched
    places = [list(placements(t.table, ranks, per_node, copies)) for t in tables]
    held = [
        (shards(found.table, i, place, per_node)[0], lookup)
        for i, found in enumerate(tables)
        for place in places[i]
        for lookup in found.lookups
    ]
    priced = iter(_shard_us(capture, held, ranks, rate, book))
    return [
        [Way(place, sum(next(priced) for _ in found.lookups)) for place in mine]
        for found, mine in zip(tables, places, strict=True)
    ]


def _rank_us(
    capture: StepCapture, held: Held, ranks: int, rate: float, book: PriceBook
) -> np.ndarray:
    """Time in us of the lookups, updates and messages of each rank's shards."""
    spread = [(s, x) for s, x in held if not s.local]
    found = np.zeros(ranks)
    for (shard, _), us in zip(spread, _shard_us(capture, spread, ranks, rate, book), strict=True):
        found[shard.rank] += us
    return found


def _shard_us(
    capture: StepCapture, held: Held, ranks: int, rate: float, book: PriceBook
) -> list[float]:
    """Time in us that each shard adds to its rank: lookups, updates, messages.

    The rank receives row numbers of the other ranks' samples and sends their pooled vectors; as
    many bytes of gradients come back. Of a copy the gradients of all rows are summed over ranks.
    All at ``rate`` bytes/s.
    """
    ids, optimizer = fresh_storages(capture), capture.optimizer
    if _software(book).batched:
        calls = [batched_calls([(s, x)], ranks, optimizer, ids) for s, x in held]
    else:
        calls = [lookup_calls(s, x, ranks, optimizer, ids) for s, x in held]
    priced = iter(book.price([priceable(c, 1.0) for f, back in calls for c in (f, *back)]))
    found = []
    for (shard, lookup), (_, back) in zip(held, calls, strict=True):
        ops = [next(priced) for _ in range(1 + len(back))]
        numbers, vectors = message_bytes(shard, lookup.table, lookup.samples)
        sent = (ranks - 1) * (numbers + (1 + bool(back)) * vectors)
        if shard.local:
            rows_bytes = shard.rows * shard.columns * lookup.table.sent_bytes
            sent = bool(back) * 2 * (ranks - 1) / ranks * rows_bytes
        sent_us = 1e6 * sent / rate
        found.append(sum(max(op.duration_us, op.launch_us or 0.0) for op in ops) + sent_us)
    return found
