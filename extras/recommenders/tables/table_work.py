"""What sharded embedding tables add to a rank's step: lookups, updates, copies and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, TensorSpec
from itercast.compose.parallel.captured_tables import BAG, ROWS
from itercast.extras.lookups.embedding_bag import MODES
from itercast.extras.recommenders.sharded_model import Shard
from itercast.extras.recommenders.tables.captured import CapturedTable, Lookup
from itercast.extras.recommenders.tables.fetched_rows import moved_bytes, shard_stream
from itercast.extras.recommenders.tables.placement import (
    INDEX_BYTES,
    Sharding,
    length_bytes,
    message_bytes,
    shards,
)
from itercast.microbench.store import Row

SMALL_OPS: Mapping[str, int] = assumed(__file__, "small_ops")
PASSES_IN_PARTS: int = assumed(__file__, "passes_in_parts")
PASSES: Mapping[str, int] = assumed(__file__, "passes")
SPARSE_BACKWARD, SPARSE_UPDATE = "itercast.sparse_backward", "itercast.sparse_update"
# Parts that tables add to a step, and their phases.
PHASES: Mapping[str, str] = {
    "pack numbers": "forward",
    "send numbers": "forward",
    "sort numbers": "forward",
    "fetch rows": "forward",
    "look up": "forward",
    "pack vectors": "forward",
    "send vectors": "forward",
    "gather vectors": "forward",
    "join vectors": "forward",
    "pack gradients": "backward",
    "send gradients": "backward",
    "update tables": "optimizer",
}
LOOPS = (  # of small ops, by part
    ("pack numbers", ("sent", "sent_in_parts")),
    ("look up", ("held",)),
    ("join vectors", ("joined",)),
    ("update tables", ("updated",)),
)


def lookup_calls(
    shard: Shard, lookup: Lookup, ranks: int, optimizer: str, ids: Iterator[int], tables: int = 1
) -> tuple[OpCall, tuple[OpCall, ...]]:
    """A shard's lookup for the samples of all ranks; its gradient calls and its update.

    ``tables``: so many tables like it are looked up one after the other.
    """
    table, samples = lookup.table, lookup.samples_of(shard, ranks)
    looked_up = max(1, round(samples * table.pooling * shard.rows / table.rows))
    facts = shard_stream(table, shard.rows, samples)
    if tables > 1:
        facts["tables"] = tables
    known: Row = {"kwargs": {"stream": facts}} if facts else {}
    mode = MODES.index(lookup.mode)

    def tensor(*shape: int, dtype: str = table.dtype) -> TensorSpec:
        return TensorSpec(shape=shape, dtype=dtype, storage=next(ids))

    weight, index = tensor(shard.rows, shard.columns), tensor(looked_up, dtype="int64")
    vectors = samples if table.pooled else looked_up
    out, received = tensor(vectors, shard.columns), tensor(vectors, shard.columns)
    gradient = tensor(looked_up, shard.columns) if table.pooled else received
    backward = []
    if table.pooled:
        args = (received, index, shard.rows, mode, table.weighted)
        backward.append(OpCall(op=SPARSE_BACKWARD, args=args, outputs=(gradient,), **known))
    if optimizer != "none":
        how = optimizer if optimizer in ("sgd", "adagrad") else "adam"
        update = OpCall(op=SPARSE_UPDATE, args=(weight, gradient, how), outputs=(weight,), **known)
        backward.append(update)
    after = tuple(replace(call, phase="optimizer") for call in backward)
    if not table.pooled:
        return OpCall(op=ROWS, args=(weight, index), outputs=(out,)), after
    weights = tensor(looked_up) if table.weighted else None
    starts = tensor(samples, dtype="int64")
    bag = (weight, index, starts, False, mode, True, weights)
    return OpCall(op=BAG, args=bag, outputs=(out,), **known), after


def choosing_calls(asked: int, kept: int, ids: Iterator[int]) -> list[OpCall]:
    """Ops on a CPU that choose the row numbers of a shard with a part of the rows, ``kept`` of all.

    Those of ``itercast.extras.recommenders.sharded_dlrm.ShardedStep._of_shard`` that grow with the
    row numbers; its other ops are among ``SMALL_OPS``.
    """

    def tensor(length: int, dtype: str = "int64") -> TensorSpec:
        return TensorSpec(shape=(length,), dtype=dtype, storage=next(ids))

    index, least, most, inside = tensor(asked), *(tensor(asked, "bool") for _ in range(3))
    counted, where, chosen = tensor(asked), tensor(kept), tensor(kept)
    steps = (
        ("ge.Scalar", (index, 0), least),
        ("lt.Scalar", (index, asked), most),
        ("bitwise_and.Tensor", (least, most), inside),
        ("cumsum.default", (inside, 0), counted),
        ("constant_pad_nd.default", (counted, (1, 0), 0.0), tensor(asked + 1)),
        ("nonzero.default", (inside,), where),
        ("index.Tensor", (index, (where,)), chosen),
        ("sub.Tensor", (chosen, 1), tensor(kept)),
    )
    return [OpCall(op=f"aten.{op}", args=args, outputs=(made,)) for op, args, made in steps]


def traffic(held: Sequence[tuple[Shard, Lookup]], ranks: int) -> dict[str, np.ndarray]:
    """Bytes that ranks send and receive, shape (2, ranks), by what lookups of shards exchange.

    ``lengths`` of bags go ahead of row ``numbers``; pooled ``vectors`` come back, and their
    gradients are as many bytes the other way. Shards that are local send nothing.
    """
    moved = {name: np.zeros((2, ranks)) for name in ("lengths", "numbers", "vectors")}
    for shard, lookup in held:
        if not shard.local:
            numbers, vectors = message_bytes(shard, lookup.table, lookup.asked)
            lengths = length_bytes(shard, lookup.table, lookup.asked)
            for name, nbytes in (("lengths", lengths), ("numbers", numbers)):
                moved[name][0] += nbytes
                moved[name][1, shard.rank] += ranks * nbytes
            moved["vectors"][0, shard.rank] += ranks * vectors
            moved["vectors"][1] += vectors
    return moved


def held_shards(
    tables: Sequence[CapturedTable], sharding: Sharding, per_node: int
) -> list[tuple[Shard, Lookup]]:
    """Every shard with each of the calls that look its table up."""
    return [
        (shard, lookup)
        for i, (found, place) in enumerate(zip(tables, sharding, strict=True))
        for shard in shards(found.table, i, place, per_node)
        for lookup in found.lookups
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What tables add to the step of one rank.

    ``mine``: the shards that it holds. ``chosen``: on a CPU the row numbers that it looks through
    for each shard with a part of the rows, and how many it finds. By part of the step
    (``PHASES``), in bytes: what it copies, and the messages that all ranks exchange; and its small
    ops (``SMALL_OPS``; none on a GPU).
    ``fetched``: bytes by tier and kind (``tiers``), before the lookups.
    """

    mine: Sequence[tuple[Shard, Lookup]]
    chosen: Sequence[tuple[int, int]]
    copied: Mapping[str, Sequence[float]]
    sent: Mapping[str, Sequence[float]]
    small_ops: Mapping[str, int]
    fetched: Mapping[tuple[str, str], float]

    @property
    def own(self) -> Sequence[tuple[Shard, Lookup]]:
        """Shards that are looked up for the samples of all ranks."""
        return [(s, x) for s, x in self.mine if not s.local]


def table_work(
    held: Sequence[tuple[Shard, Lookup]],
    rank: int,
    ranks: int,
    *,
    on_cpu: bool,
    optimizer: str = "none",
) -> TableWork:
    """The work of one rank; messages are as large as the most that any rank sends or receives."""
    moved, spread = traffic(held, ranks), [(s, x) for s, x in held if not s.local]
    own = sum(s.rank == rank for s, _ in spread)
    cut = [(s.rows / x.table.rows, x) for s, x in spread if s.rows < x.table.rows]
    numbers_of = [(share, x.asked * x.table.pooling) for share, x in cut]
    passed = [] if on_cpu else [PASSES_IN_PARTS * INDEX_BYTES * n for _, n in numbers_of]
    chosen = [(max(1, round(n)), max(1, round(share * n))) for share, n in numbers_of]
    lengths, numbers, vectors = (float(both.max()) for both in moved.values())
    packed, received = moved["vectors"][:, rank]
    rearranged = {
        "sort numbers": [PASSES["row_numbers"] * moved["numbers"][1, rank]],
        "join vectors": [PASSES["joined"] * received],
        "pack gradients": [PASSES["gradients"] * received],
    }
    counts = {"sent": len(spread) - len(cut), "sent_in_parts": len(cut), "held": own}
    counts |= {"joined": len(spread), "updated": own}
    small_ops = {part: sum(SMALL_OPS[k] * counts[k] for k in kinds) for part, kinds in LOOPS}
    mine = [(s, x) for s, x in held if s.rank == rank]
    alike = max((x.alike for _, x in held), default=1)
    return TableWork(
        mine=mine,
        chosen=chosen if on_cpu else (),
        fetched=moved_bytes(mine, ranks, optimizer),
        copied={
            "pack numbers": [*passed, lengths + numbers],
            "pack vectors": [packed],
            "update tables": [packed],
            **(rearranged if on_cpu else {}),
        },
        sent={
            "send numbers": [lengths, numbers],
            "send vectors": [vectors],
            "gather vectors": [alike * received] if alike > 1 else [],
            "send gradients": [vectors],
        },
        small_ops=small_ops if on_cpu else {},
    )


def in_a_row(tables: Sequence[CapturedTable], ranks: int, *, on_cpu: bool) -> int:
    """Lookups that a rank makes one after the other, on average; a GPU's follow other ops."""
    return max(1, round(sum(len(t.lookups) for t in tables) / ranks)) if on_cpu else 1
