"""A DLRM and where its tables are, as it is measured and forecast; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.extras.recommenders.tables.index_streams import IndexStream

UNIFORM = IndexStream()


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


def state_per_weight(optimizer: str) -> int:
    """Numbers that an optimizer keeps for each weight of a table."""
    return {"none": 0, "sgd": 0, "adagrad": 1}.get(optimizer, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table and how a batch looks it up: ``pooling`` rows per sample on average.

    ``pooled``: the rows of a sample are summed; else each lookup is a sample that gets its row.
    ``sent``: dtype in which vectors travel, empty for that of the table; ``index``: dtype of row
    numbers, with which ``lengths`` of bags are sent where they are not constant.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    dtype: str = "fp32"
    weighted: bool = False
    stream: IndexStream = UNIFORM
    pooled: bool = True
    sent: str = ""
    index: str = "int64"
    lengths: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * ITEMSIZE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.rows * self.row_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of a number of a vector that travels."""
        return ITEMSIZE_BYTES[self.sent or self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingModel:
    """A DLRM (arXiv:1906.00091) to be sharded; ``batch`` is samples of each rank.

    ``bottom``, ``top``: as of ``DenseDlrm``, by default as facebookresearch/dlrm for Criteo Kaggle.
    Pooled vectors of all tables have ``dim`` elements, as the interaction needs them.
    """

    batch: int
    tables: tuple[Table, ...]
    features: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    optimizer: str = "sgd"

    @property
    def dim(self) -> int:
        """Elements of a table's pooled vector."""
        return self.tables[0].dim

    @property
    def state(self) -> int:
        """Numbers of the tables' optimizer per weight."""
        return state_per_weight(self.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel(RankingModel):
    """A DLRM and where its tables are."""

    shards: tuple[Shard, ...]
