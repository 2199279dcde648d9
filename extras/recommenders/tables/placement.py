"""Embedding tables, how they are sharded over ranks, and such plans in torchrec's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.compose.parallel.placement import SSD, UVM
from itercast.extras.recommenders.sharded_model import Shard, Table
from itercast.microbench.store import Row

INDEX_BYTES = 8  # int64 row numbers and lengths of bags
KINDS = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")
HBM = "hbm"
# Where a table lies, by torchrec's compute kernel; the usual share of rows in a cache in HBM.
KERNELS = {"fused": HBM, "dense": HBM, "fused_uvm": UVM, "fused_uvm_caching": UVM, "key_value": SSD}
LOAD_FACTOR: float = assumed(__file__, "load_factor")


@dataclass(frozen=True, slots=True)
class Placement:
    """How one table is sharded, in torchrec's terms, over ``ranks`` in the order of its shards.

    - data_parallel: a copy on each rank; - table_wise: whole on one rank;
    - column_wise: its dim cut in equal parts; - row_wise: its rows cut over all ranks;
    - table_row_wise: its rows cut over the ranks of one node;
    - grid_shard: its dim cut over nodes, each part row-wise within its node.

    Its ``tier`` is a GPU's memory, the host's (uvm) or an SSD; then a share ``cached`` of the rows,
    those looked up most, is in the GPU's memory too.
    """

    kind: str
    ranks: tuple[int, ...]
    tier: str = HBM
    cached: float = 1.0


Sharding = tuple[Placement, ...]  # one placement per table


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
            where = (first_row, rows, first_column, columns, local, place.tier, place.cached)
            found.append(Shard(number, rank, *where))
    return found


def _part(size: int, index: int, parts: int) -> tuple[int, int]:
    """Start and length of one of equal parts; the last ones are shorter (torchrec's blocks)."""
    block = -(-size // parts)
    start = min(size, index * block)
    return start, min(size, start + block) - start


def message_bytes(shard: Shard, table: Table, samples: int) -> tuple[float, float]:
    """Bytes exchanged between one rank and a shard on another rank for the rank's samples.

    Row numbers go to the shard; pooled vectors come back, and as much of their gradients goes
    there.
    """
    looked_up = samples * table.pooling * shard.rows / table.rows
    vectors = samples if table.pooled else looked_up
    return (ITEMSIZE_BYTES[table.index] * looked_up, vectors * shard.columns * table.sent_bytes)


def length_bytes(shard: Shard, table: Table, samples: int) -> float:
    """Bytes of the lengths of bags that go to a shard on another rank, in their own message."""
    sent = table.pooled and table.lengths and not shard.local
    return float(ITEMSIZE_BYTES[table.index] * samples) if sent else 0.0


def check_sharding(
    sharding: Sharding, tables: Sequence[Table], world_size: int, per_node: int
) -> None:
    """Raise ValueError where a placement does not fit its table or the ranks."""
    if len(sharding) != len(tables):
        raise ValueError(f"{len(sharding)} placements for {len(tables)} tables")
    for table, place in zip(tables, sharding, strict=True):
        if wrong := _problem(table, place, world_size, per_node):
            raise ValueError(f"table {table.name!r}: {place.kind} on {list(place.ranks)}: {wrong}")


def _problem(table: Table, place: Placement, world_size: int, per_node: int) -> str:
    """What is wrong with a placement, by what is allowed; empty if nothing is."""
    ranks, kind = place.ranks, place.kind
    if kind not in KINDS:
        return f"allowed kinds are {', '.join(KINDS)}"
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= r < world_size for r in ranks):
        return f"ranks are different numbers from 0 to {world_size - 1}"
    if kind == "table_wise" and len(ranks) != 1:
        return "a whole table is on one rank"
    if kind in ("data_parallel", "row_wise") and len(ranks) != world_size:
        return f"it takes all {world_size} ranks"
    if kind == "data_parallel" and place.tier != HBM:
        return "copies lie in the GPU's memory"
    if kind == "column_wise" and (table.dim % len(ranks) or len(ranks) < 2):
        return f"dim {table.dim} is cut in 2 or more equal parts"
    nodes = {r // per_node for r in ranks}
    if kind == "table_row_wise" and (len(nodes) > 1 or len(ranks) != per_node):
        return f"it takes the {per_node} ranks of one node"
    if kind == "grid_shard" and (len(ranks) != len(nodes) * per_node or table.dim % len(nodes)):
        return f"it takes whole nodes of {per_node} ranks, and their number divides dim {table.dim}"
    return ""


def memory_bytes(
    sharding: Sequence[Placement],
    tables: Sequence[Table],
    state: float,
    world_size: int,
    per_node: int,
) -> list[int]:
    """Bytes of the tables on each GPU, with ``state`` numbers of the optimizer per weight."""
    found = [0] * world_size
    for i, (table, place) in enumerate(zip(tables, sharding, strict=True)):
        for shard in shards(table, i, place, per_node):
            weights = shard.cached * shard.rows * shard.columns * (table.row_bytes // table.dim)
            found[shard.rank] += round(weights * (1 + state))
    return found


def to_torchrec(sharding: Sharding, tables: Sequence[Table], per_node: int, device: str) -> str:
    """The sharding as JSON in the fields of torchrec's ``ParameterSharding``, by table."""
    plan: Row = {}
    for i, (table, place) in enumerate(zip(tables, sharding, strict=True)):
        spec = [
            {
                "shard_offsets": [s.first_row, s.first_column],
                "shard_sizes": [s.rows, s.columns],
                "placement": f"rank:{s.rank}/{device}",
            }
            for s in shards(table, i, place, per_node)
        ]
        kernel = {UVM: "fused_uvm_caching" if place.cached else "fused_uvm", SSD: "key_value"}
        fused = "dense" if place.kind == "data_parallel" else "fused"
        plan[table.name] = {
            "sharding_type": place.kind,
            "compute_kernel": kernel.get(place.tier, fused),
            **({"cache_params": {"load_factor": place.cached}} if place.tier != HBM else {}),
            "ranks": list(place.ranks),
            "sharding_spec": None if place.kind == "data_parallel" else {"shards": spec},
        }
    return json.dumps(plan, indent=1) + "\n"


def from_torchrec(text: str, tables: Sequence[Table]) -> Sharding:
    """Reads a sharding from JSON as ``to_torchrec`` writes it; ValueError for other text or tables.

    A table is named as it is, or by its number.
    """
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(plan, Mapping):
        raise ValueError("expected a table's name and its sharding per entry")
    names = {t.name for t in tables}
    keys = [t.name if t.name in plan else str(i) for i, t in enumerate(tables)]
    unknown = [name for name in plan if name not in {*names, *keys}]
    if unknown:
        told = ", ".join(t.name for t in tables[:8]) + (", ..." if len(tables) > 8 else "")
        raise ValueError(f"unknown table {unknown[0][:80]!r}; known: {told}")
    return tuple(_placement(plan.get(key), t) for key, t in zip(keys, tables, strict=True))


def _placement(entry: object, table: Table) -> Placement:
    if not isinstance(entry, Mapping):
        raise ValueError(f"table {table.name!r}: no sharding")
    kind, ranks = entry.get("sharding_type"), entry.get("ranks")
    good = isinstance(ranks, Sequence) and not isinstance(ranks, str)
    if kind not in KINDS or not good or not all(type(r) is int for r in ranks or ()):
        raise ValueError(
            f"table {table.name!r}: needs sharding_type ({', '.join(KINDS)}) and a list of ranks"
        )
    return Placement(str(kind), tuple(ranks or ()), *_tier(entry, table))


def _tier(entry: Mapping[str, object], table: Table) -> tuple[str, float]:
    """Where a table lies, and the share of its rows in a cache."""
    kernel, params = entry.get("compute_kernel") or "fused", entry.get("cache_params") or {}
    if kernel not in KERNELS:
        known = ", ".join(KERNELS)
        raise ValueError(f"table {table.name!r}: compute_kernel {kernel!r}; known: {known}")
    if KERNELS[str(kernel)] == HBM or kernel == "fused_uvm":
        return KERNELS[str(kernel)], float(kernel != "fused_uvm")
    share = params.get("load_factor", LOAD_FACTOR) if isinstance(params, Mapping) else None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"table {table.name!r}: load_factor is from 0 to 1, got {share!r}")
    return KERNELS[str(kernel)], float(share)
