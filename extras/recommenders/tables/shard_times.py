"""Times of the shards of a captured step's tables, and the sharding that balances them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from itercast.compose.parallel.device_memory import table_room_bytes
from itercast.compose.parallel.placement import UVM
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, PricedOp, priceable
from itercast.extras.recommenders.sharded_model import Shard
from itercast.extras.recommenders.tables.batched_tables import batched_calls
from itercast.extras.recommenders.tables.captured import CapturedTable
from itercast.extras.recommenders.tables.fetched_rows import fetched_us
from itercast.extras.recommenders.tables.greedy import Way, balanced, placements
from itercast.extras.recommenders.tables.placement import (
    HBM,
    Placement,
    Sharding,
    memory_bytes,
    message_bytes,
    shards,
)
from itercast.extras.recommenders.tables.table_work import in_a_row, lookup_calls
from itercast.microbench.hardware.stack import TableSoftware, stack_of_row

# no assumption: shares of rows in a cache that are tried
CACHED = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)


def table_software(book: PriceBook) -> TableSoftware:
    """How the forecast stack looks tables up; on a CPU as torch does."""
    return TableSoftware() if book.gpu.kind == "cpu" else stack_of_row(book.stack).tables


def _less_cached(place: Placement) -> Placement | None:
    """The placement with the next smaller cache; None where there is none."""
    smaller = [share for share in CACHED if share < place.cached]
    if place.kind == "data_parallel" or not smaller:
        return None
    return replace(place, tier=UVM if place.tier == HBM else place.tier, cached=smaller[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTime:
    """What a shard adds to its rank: its lookups, its update, and messages.

    The rank receives row numbers of the other ranks' samples and sends their pooled vectors; as
    many bytes of gradients come back. For a copy of a table the gradients of all rows are summed
    over ranks. ``sent_us`` includes rows fetched from other memory.
    """

    forward: tuple[PricedOp, ...]
    backward: tuple[PricedOp, ...]
    sent_us: float

    @property
    def work_us(self) -> float:
        """Time of lookups and updates."""
        return sum(op.duration_us for op in self.forward + self.backward)

    @property
    def total_us(self) -> float:
        """Time of lookups, updates and messages."""
        return self.work_us + self.sent_us


class ShardTimes:
    """What shards of a step's tables add to their ranks; equal shards are priced once.

    ``rate``: bytes/s of a rank's slowest link to others.
    """

    def __init__(
        self,
        tables: Sequence[CapturedTable],
        optimizer: str,
        ranks: int,
        per_node: int,
        rate: float,
        book: PriceBook,
    ) -> None:
        self.tables, self.optimizer, self.ranks = tables, optimizer, ranks
        self.per_node, self.rate, self.book = per_node, rate, book
        self.batched = table_software(book).batched
        self.row = in_a_row(tables, ranks, on_cpu=book.gpu.kind == "cpu")
        self.known: dict[tuple[object, ...], ShardTime] = {}

    def of(self, held: Sequence[Shard]) -> list[ShardTime]:
        """The time of each shard; those not known yet are priced in one call per family."""
        keys = [(s.table, s.rows, s.columns, s.local, s.tier, s.cached) for s in held]
        fresh = {key: s for key, s in zip(keys, held, strict=True) if key not in self.known}
        wanted = {key: self._wanted(s) for key, s in fresh.items()}
        self.book.prefetch([w for ops in wanted.values() for w in (*ops[0], *ops[1])])
        for key, (forward, backward) in wanted.items():
            self.known[key] = ShardTime(
                forward=tuple(self.book.price(forward)),
                backward=tuple(self.book.price(backward)),
                sent_us=self._sent_us(fresh[key]) + self._fetched_us(fresh[key]),
            )
        return [self.known[key] for key in keys]

    def placed(self, table: int, place: Placement) -> list[Shard]:
        """The shards of a placed table."""
        return shards(self.tables[table].table, table, place, self.per_node)

    def held(self, sharding: Sharding) -> list[tuple[Shard, ShardTime]]:
        """All shards with their times."""
        held = [s for i, place in enumerate(sharding) for s in self.placed(i, place)]
        return list(zip(held, self.of(held), strict=True))

    def slowest(self, sharding: Sharding) -> int:
        """The rank that spends most time on its shards; copies are alike on all."""
        spent = np.zeros(self.ranks)
        for shard, time in self.held(sharding):
            spent[shard.rank] += 0.0 if shard.local else time.total_us
        return int(np.argmax(spent))

    def greedy(self, state: float) -> Sharding:
        """Tables spread by the time of their shards, costly ones in columns and rows.

        ``state``: numbers of the optimizer per weight.
        """
        listed = [t.table for t in self.tables]
        places = [list(placements(t, self.ranks, self.per_node, self.batched)) for t in listed]
        first = [self.placed(i, p)[0] for i, mine in enumerate(places) for p in mine]
        us = iter([time.total_us for time in self.of(first)])
        ways = [[Way(place, next(us)) for place in mine] for mine in places]
        limit_bytes = table_room_bytes(self.book.gpu, self.ranks)
        found = balanced(listed, ways, self.ranks, self.per_node, limit_bytes, state)
        return self.tiered(found, state, limit_bytes)

    def tiered(self, sharding: Sharding, state: float, limit_bytes: float) -> Sharding:
        """The sharding with tables moved to host memory until each GPU has room for the rest.

        Each round shrinks the cache of one table on the fullest rank: the one where that costs
        least time per byte.
        """
        listed, found = [t.table for t in self.tables], list(sharding)
        if self.book.gpu.pcie_bytes_per_s == 0:
            return sharding
        while True:
            used = memory_bytes(found, listed, state, self.ranks, self.per_node)
            rank = int(np.argmax(used))
            less = {i: _less_cached(p) for i, p in enumerate(found) if rank in p.ranks}
            steps = {i: p for i, p in less.items() if p is not None}
            if used[rank] <= limit_bytes or not steps:
                return tuple(found)
            costs = {i: self._per_byte(i, found[i], p) for i, p in steps.items()}
            best = min(costs, key=lambda i: costs[i])
            found[best] = steps[best]

    def _per_byte(self, table: int, now: Placement, less: Placement) -> float:
        """Time that a smaller cache costs a table's first shard, per byte that it frees."""
        (a, *_), (b, *_) = self.placed(table, now), self.placed(table, less)
        row_bytes = self.tables[table].table.row_bytes
        return (self._fetched_us(b) - self._fetched_us(a)) / (
            (a.cached - b.cached) * a.rows * row_bytes
        )

    def _fetched_us(self, shard: Shard) -> float:
        held = [(shard, x) for x in self.tables[shard.table].lookups]
        return fetched_us(held, self.ranks, self.optimizer, self.book.gpu)

    def _wanted(self, shard: Shard) -> tuple[list[Priceable], list[Priceable]]:
        """Ops of a shard's lookups, and of its update."""
        forward, backward, ids = list[Priceable](), list[Priceable](), count()
        for x in self.tables[shard.table].lookups:
            if self.batched:
                first, back = batched_calls([(shard, x)], self.ranks, self.optimizer, ids)
            else:
                first, back = lookup_calls(shard, x, self.ranks, self.optimizer, ids, self.row)
            forward.append(priceable(first))
            backward += [priceable(c) for c in back]
        return forward, backward

    def _sent_us(self, shard: Shard) -> float:
        """Time of messages between a shard and other ranks."""
        trains, others = self.optimizer != "none", self.ranks - 1
        found = 0.0
        for x in self.tables[shard.table].lookups:
            numbers, vectors = message_bytes(shard, x.table, x.asked)
            gradient_bytes = shard.rows * shard.columns * x.table.sent_bytes
            summed = trains * 2 * others / self.ranks * gradient_bytes
            found += summed if shard.local else others * (numbers + (1 + trains) * vectors)
        return 1e6 * found / self.rate
