"""Chooses where the tables of a captured step go, and the rank whose step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.parallel.batched_tables import BatchedStep, as_stored, batched_calls
from itercast.compose.parallel.captured_tables import CapturedTable, captured_tables
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.parallel.greedy import Way, balanced, placements
from itercast.compose.parallel.placement import (
    Placement,
    Sharding,
    check_sharding,
    from_torchrec,
    memory_bytes,
    message_bytes,
    shards,
)
from itercast.compose.parallel.table_work import in_a_row, lookup_calls
from itercast.compose.parallel.tables import RankStep, rank_step
from itercast.compose.pricing.collectives import Cluster
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, PricedOp, priceable
from itercast.microbench.hardware.stack import TableSoftware, stack_of_row
from itercast.microbench.iterations.sharded_model import Shard
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import GREEDY, ParallelPlan


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
    per_node, rate = where.groups["tables"].per_node, where.slowest_bytes_per_s("tables")
    try:
        return _slowest_rank(capture, text, plan.table_ranks, per_node, rate, book)
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
    software = table_software(book)
    tables = as_stored(captured_tables(capture), software)
    if not tables:
        raise ValueError("shard spreads embedding tables, and the model has none")
    state = float(STATE_COPIES[capture.optimizer])
    times = ShardTimes(tables, capture.optimizer, ranks, per_node, rate, book)
    if text is not None:
        sharding = from_torchrec(text, [t.table for t in tables])
        check_sharding(sharding, [t.table for t in tables], ranks, per_node)
    else:
        sharding = times.greedy(state)
    rank = times.slowest(sharding)
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


def table_software(book: PriceBook) -> TableSoftware:
    """How the forecast stack looks tables up; on a CPU as torch does."""
    return TableSoftware() if book.gpu.kind == "cpu" else stack_of_row(book.stack).tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTime:
    """What a shard adds to its rank: its lookups, its update, and messages.

    The rank receives row numbers of the other ranks' samples and sends their pooled vectors; as
    many bytes of gradients come back. Of a copy the gradients of all rows are summed over ranks.
    """

    forward: tuple[PricedOp, ...]
    backward: tuple[PricedOp, ...]
    sent_us: float

    @property
    def work_us(self) -> float:
        """Time of lookups and updates."""
        return sum(max(op.duration_us, op.launch_us or 0.0) for op in self.forward + self.backward)

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
        self.known: dict[tuple[int, int, int, bool], ShardTime] = {}

    def of(self, held: Sequence[Shard]) -> list[ShardTime]:
        """The time of each shard; those not known yet are priced in one call per family."""
        keys = [(s.table, s.rows, s.columns, s.local) for s in held]
        fresh = {key: s for key, s in zip(keys, held, strict=True) if key not in self.known}
        wanted = {key: self._wanted(s) for key, s in fresh.items()}
        self.book.prefetch([w for ops in wanted.values() for w in (*ops[0], *ops[1])])
        for key, (forward, backward) in wanted.items():
            self.known[key] = ShardTime(
                forward=tuple(self.book.price(forward)),
                backward=tuple(self.book.price(backward)),
                sent_us=1e6 * self._sent_bytes(fresh[key]) / self.rate,
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
        plan = ParallelPlan(dp=self.ranks, shard=GREEDY)
        limit_bytes = room_bytes(self.book.gpu, plan)
        return balanced(listed, ways, self.ranks, self.per_node, limit_bytes, state)

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

    def _sent_bytes(self, shard: Shard) -> float:
        """Bytes of messages between a shard and other ranks."""
        trains, others = self.optimizer != "none", self.ranks - 1
        found = 0.0
        for x in self.tables[shard.table].lookups:
            numbers, vectors = message_bytes(shard, x.table, x.samples)
            gradient_bytes = shard.rows * shard.columns * x.table.sent_bytes
            summed = trains * 2 * others / self.ranks * gradient_bytes
            found += summed if shard.local else others * (numbers + (1 + trains) * vectors)
        return found
