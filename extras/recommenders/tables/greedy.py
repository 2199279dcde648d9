"""Spreads embedding tables over ranks greedily, the costliest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from itercast.extras.recommenders.sharded_model import Table
from itercast.extras.recommenders.tables.placement import Placement, Sharding

MIN_COLUMNS = 4  # of a part of a table


@dataclass(frozen=True, slots=True)
class Way:
    """One way to place a table, told by its placement on the first ranks, and a shard's cost."""

    place: Placement
    cost: float

    @property
    def total(self) -> float:
        """Cost of all of its shards."""
        return self.cost * len(self.place.ranks)


def greedy(
    tables: Sequence[Table],
    costs: Sequence[float],
    ranks: int,
    limit_bytes: float,
    state: float = 0.0,
    parts: int = 1,
) -> Sharding:
    """Gives each table, by falling cost, to the rank with the least cost so far that has room.

    Where ``parts`` > 1, tables that cost more than half of a rank's mean are cut column-wise into
    so many parts. Where no rank has room, the one with most room takes the table. ``state``:
    numbers of the optimizer per weight.
    """
    half = sum(costs) / ranks / 2 if parts > 1 else inf
    ways = [
        Way(Placement("column_wise", tuple(range(parts))), cost / parts)
        if cost > half and table.dim % parts == 0 and table.dim // parts >= MIN_COLUMNS
        else Way(Placement("table_wise", (0,)), cost)
        for table, cost in zip(tables, costs, strict=True)
    ]
    return _spread(tables, ways, ranks, 1, limit_bytes, state)[0]


def placements(
    table: Table, ranks: int, per_node: int, copies: bool = False
) -> Iterator[Placement]:
    """Ways to place a table on the first of so many ranks: whole, in columns, rows, or both.

    With ``copies`` also as one on each rank.
    """
    yield Placement("table_wise", (0,))
    if copies:
        yield Placement("data_parallel", tuple(range(ranks)))
    parts = 2
    while parts <= min(ranks, table.dim // MIN_COLUMNS):
        if table.dim % parts == 0:
            yield Placement("column_wise", tuple(range(parts)))
        parts *= 2
    nodes = ranks // per_node
    if nodes > 1 and per_node > 1 and ranks % per_node == 0:
        yield Placement("table_row_wise", tuple(range(per_node)))
        for n in range(2, nodes + 1):
            if table.dim % n == 0 and table.dim // n >= MIN_COLUMNS:
                yield Placement("grid_shard", tuple(range(n * per_node)))
    if ranks > 1:
        yield Placement("row_wise", tuple(range(ranks)))


def balanced(
    tables: Sequence[Table],
    ways: Sequence[Sequence[Way]],
    ranks: int,
    per_node: int,
    limit_bytes: float,
    state: float = 0.0,
) -> Sharding:
    """Spreads tables, and cuts those on the slowest rank as long as that makes it faster.

    ``ways``: how each table can be placed. A way with more cost in all counts only if each shard
    costs less. No cut helps once the slowest rank has the mean of all.
    """
    finer = [_finer(mine) for mine in ways]
    at = [0] * len(tables)
    best: tuple[tuple[float, float], Sharding] | None = None
    while True:
        chosen = [mine[k] for mine, k in zip(finer, at, strict=True)]
        found, spent, used = _spread(tables, chosen, ranks, per_node, limit_bytes, state)
        score = (max(float(used.max()), limit_bytes), float(spent.max()))
        if best is None or score < best[0]:
            best = (score, found)
        slowest = int(np.argmax(spent if used.max() <= limit_bytes else used))
        more = [
            i
            for i, place in enumerate(found)
            if slowest in place.ranks and at[i] + 1 < len(finer[i])
        ]
        if not more or (spent.mean() >= best[0][1] and best[0][0] <= limit_bytes):
            return best[1]
        at[max(more, key=lambda i: chosen[i].cost)] += 1


def _finer(ways: Sequence[Way]) -> list[Way]:
    """From the least total cost on, each way whose shards cost less than those of all before."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.total, len(w.place.ranks))):
        if not found or way.cost < found[-1].cost:
            found.append(way)
    return found


def _spread(
    tables: Sequence[Table],
    ways: Sequence[Way],
    ranks: int,
    per_node: int,
    limit_bytes: float,
    state: float,
) -> tuple[Sharding, np.ndarray, np.ndarray]:
    """Place tables by falling cost, on ranks that spent least; also cost and bytes by rank."""
    spent, used = np.zeros(ranks), np.zeros(ranks)
    found: dict[int, Placement] = {}
    for i in sorted(range(len(tables)), key=lambda i: (-ways[i].cost, -tables[i].nbytes)):
        kind, parts = ways[i].place.kind, len(ways[i].place.ranks)
        nbytes = tables[i].nbytes * (1 + state) / (1 if kind == "data_parallel" else parts)
        # Ranks that are taken together: those of a node, or each by itself.
        by_node = per_node if kind in ("table_row_wise", "grid_shard") else 1
        groups = np.arange(ranks).reshape(-1, by_node)
        fullest = used[groups].max(axis=1)
        room = fullest + nbytes <= limit_bytes
        order = np.lexsort((spent[groups].max(axis=1), fullest if not room.any() else ~room))
        taken = np.arange(ranks) if parts == ranks else groups[order[: parts // by_node]].ravel()
        spent[taken] += ways[i].cost
        used[taken] += nbytes
        found[i] = Placement(kind, tuple(int(r) for r in taken))
    return tuple(found[i] for i in range(len(tables))), spent, used
