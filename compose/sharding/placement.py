"""Placements of embedding tables on ranks, the shards they make, and torchrec's plan form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compose.sharding.tables import STATE_PER_WEIGHT, RankingModel, Table

KINDS = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True, slots=True)
class Placement:
    """How one table is sharded, in torchrec's terms, over ``ranks`` in the order of its shards.

    - data_parallel: a copy on each rank; - table_wise: whole on one rank;
    - column_wise: its dim cut in equal parts; - row_wise: its rows cut over all ranks;
    - table_row_wise: its rows cut over the ranks of one node;
    - grid_shard: its dim cut over nodes, each part row-wise within its node.
    """

    kind: str
    ranks: tuple[int, ...]


Sharding = tuple[Placement, ...]  # one placement per table


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a table on one rank: rows from ``first_row``, columns from ``first_column``.

    A ``local`` one is a copy that a rank looks up for its own samples only.
    """

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    local: bool = False


def shards(table: Table, number: int, place: Placement, per_node: int) -> list[Shard]:
    """The shards of a placed table; one that got no row or column is left out."""
    ranks = place.ranks
    if place.kind in ("table_wise", "data_parallel"):
        grid = [(r, 0, 1, 0, 1) for r in ranks]
    elif place.kind == "column_wise":
        grid = [(r, 0, 1, i, len(ranks)) for i, r in enumerate(ranks)]
    elif place.kind in ("row_wise", "table_row_wise"):
        grid = [(r, i, len(ranks), 0, 1) for i, r in enumerate(ranks)]
    else:  # grid_shard
        nodes = len(ranks) // per_node
        grid = [(r, i % per_node, per_node, i // per_node, nodes) for i, r in enumerate(ranks)]
    found = []
    for rank, row, row_parts, column, column_parts in grid:
        first_row, rows = _part(table.rows, row, row_parts)
        first_column, columns = _part(table.dim, column, column_parts)
        if rows and columns:
            local = place.kind == "data_parallel"
            found.append(Shard(number, rank, first_row, rows, first_column, columns, local))
    return found


def _part(size: int, index: int, parts: int) -> tuple[int, int]:
    """Start and length of one of equal parts; the last ones are shorter (torchrec's blocks)."""
    block = -(-size // parts)
    start = min(size, index * block)
    return start, min(size, start + block) - start


def check_sharding(sharding: Sharding, model: RankingModel, world_size: int, per_node: int) -> None:
    """Raise ValueError where a placement does not fit its table or the ranks."""
    if len(sharding) != len(model.tables):
        raise ValueError(f"{len(sharding)} placements for {len(model.tables)} tables")
    for table, place in zip(model.tables, sharding, strict=True):
        if wrong := _problem(table, place, world_size, per_node):
            raise ValueError(f"table {table.name!r}: {place.kind} on {list(place.ranks)}: {wrong}")


def _problem(table: Table, place: Placement, world_size: int, per_node: int) -> str:
    ranks, kind = place.ranks, place.kind
    if kind not in KINDS:
        return f"allowed kinds are {', '.join(KINDS)}"
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= r < world_size for r in ranks):
        return f"ranks are different numbers from 0 to {world_size - 1}"
    if kind == "table_wise" and len(ranks) != 1:
        return "a whole table is on one rank"
    if kind in ("data_parallel", "row_wise") and len(ranks) != world_size:
        return f"it takes all {world_size} ranks"
    if kind == "column_wise" and (table.dim % len(ranks) or len(ranks) < 2):
        return f"dim {table.dim} is cut in 2 or more equal parts"
    nodes = {r // per_node for r in ranks}
    if kind == "table_row_wise" and (len(nodes) > 1 or len(ranks) != per_node):
        return f"it takes the {per_node} ranks of one node"
    if kind == "grid_shard" and (len(ranks) != len(nodes) * per_node or table.dim % len(nodes)):
        return f"it takes whole nodes of {per_node} ranks, and their number divides dim {table.dim}"
    return ""


def memory_bytes(
    sharding: Sharding, model: RankingModel, world_size: int, per_node: int
) -> list[int]:
    """Bytes of weights and optimizer state of the tables on each rank."""
    found = [0] * world_size
    for i, (table, place) in enumerate(zip(model.tables, sharding, strict=True)):
        for shard in shards(table, i, place, per_node):
            weights = shard.rows * shard.columns * (table.row_bytes // table.dim)
            found[shard.rank] += round(weights * (1 + STATE_PER_WEIGHT[model.optimizer]))
    return found


def to_torchrec(sharding: Sharding, model: RankingModel, per_node: int, device: str) -> str:
    """The sharding as JSON in the fields of torchrec's ``ParameterSharding``, by table."""
    plan: dict[str, Any] = {}
    for i, (table, place) in enumerate(zip(model.tables, sharding, strict=True)):
        spec = [
            {
                "shard_offsets": [s.first_row, s.first_column],
                "shard_sizes": [s.rows, s.columns],
                "placement": f"rank:{s.rank}/{device}",
            }
            for s in shards(table, i, place, per_node)
        ]
        plan[table.name] = {
            "sharding_type": place.kind,
            "compute_kernel": "dense" if place.kind == "data_parallel" else "fused",
            "ranks": list(place.ranks),
            "sharding_spec": None if place.kind == "data_parallel" else {"shards": spec},
        }
    return json.dumps(plan, indent=1) + "\n"


def from_torchrec(text: str, model: RankingModel) -> Sharding:
    """The sharding of such a JSON text; ValueError where it is none of this model."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(plan, Mapping):
        raise ValueError("expected a table's name and its sharding per entry")
    return tuple(_placement(plan, table) for table in model.tables)


def _placement(plan: Mapping[str, Any], table: Table) -> Placement:
    entry = plan.get(table.name)
    if not isinstance(entry, Mapping):
        raise ValueError(f"table {table.name!r}: no sharding; there are {sorted(plan)[:8]}")
    kind, ranks = entry.get("sharding_type"), entry.get("ranks")
    good = isinstance(ranks, Sequence) and not isinstance(ranks, str)
    if kind not in KINDS or not good or not all(type(r) is int for r in ranks or ()):
        raise ValueError(
            f"table {table.name!r}: needs sharding_type ({', '.join(KINDS)}) and a list of ranks"
        )
    return Placement(str(kind), tuple(ranks or ()))
