"""A DLRM and where its tables are, as it is measured and forecast; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a table on one rank: rows from ``first_row``, columns from ``first_column``.

    A ``local`` one is a copy that a rank looks up for its own samples only. Of one that lies in
    another ``tier`` of memory than a GPU's own, a share ``cached`` of the rows is there too.
    """

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    local: bool = False
    tier: str = "hbm"
    cached: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """A table and its lookups: ``pooling`` rows a sample, drawn with the Zipf exponent ``skew``."""

    rows: int
    dim: int
    pooling: int
    skew: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """A DLRM and where its tables are; ``batch`` is samples of each rank.

    ``optimizer`` is that of sharded tables: sgd, adagrad or adam.
    """

    batch: int
    features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    tables: tuple[MeasuredTable, ...]
    shards: tuple[Shard, ...]
    optimizer: str = "sgd"
