"""Spreads embedding tables over ranks greedily, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compose.parallel.placement import Placement, Sharding, Table

MIN_COLUMNS = 4  # of a part of a table


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
    spent, used = np.zeros(ranks), np.zeros(ranks)
    found: dict[int, Placement] = {}
    for i in sorted(range(len(tables)), key=lambda i: -costs[i]):
        cut = parts if _cut(tables[i], parts, costs[i], sum(costs) / ranks) else 1
        nbytes = tables[i].nbytes * (1 + state) / cut
        room = used + nbytes <= limit_bytes
        order = np.lexsort((spent, used if not room.any() else ~room))
        chosen = tuple(int(r) for r in order[:cut])
        spent[list(chosen)] += costs[i] / cut
        used[list(chosen)] += nbytes
        found[i] = Placement("table_wise" if cut == 1 else "column_wise", chosen)
    return tuple(found[i] for i in range(len(tables)))


def _cut(table: Table, parts: int, cost: float, mean: float) -> bool:
    fits = parts > 1 and table.dim % parts == 0 and table.dim // parts >= MIN_COLUMNS
    return fits and cost > mean / 2
