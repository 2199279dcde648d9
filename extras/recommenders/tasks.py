"""Random DLRMs to forecast and to measure on this CPU, with tables as large as it can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from itercast.extras.recommenders.sharded_model import RankingModel, Table
from itercast.extras.recommenders.sharding.tables import OPTIMIZERS
from itercast.extras.recommenders.tables.index_streams import IndexStream
from itercast.extras.recommenders.tables.placement import Placement, Sharding

SKEWS = (0.0, 0.8, 1.05, 1.2)
TABLES_BYTES = 4 * 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sharding of a model, and the rule that proposed it."""

    name: str
    model: RankingModel
    sharding: Sharding


def unequal_task(rng: np.random.Generator) -> RankingModel:
    """Draws a model of 8 to 16 tables so unlike that it matters where they are.

    1e3 to 1e7 rows and 1 to 128 lookups a sample, both uniform in the logarithm, of hot or cold
    rows; one width of 8 to 128 for all tables, which the interaction needs. A table has at most
    half of what the others leave of ``TABLES_BYTES``: all shardings of a task are in memory at a
    time. 256 samples a rank; perceptrons are small, so that tables take most of a step.
    """
    dim, room, drawn = int(rng.choice([8, 16, 32, 64, 128])), TABLES_BYTES, list[Table]()
    for i in range(int(rng.integers(8, 17))):
        rows = min(int(10 ** rng.uniform(3, 7)), max(1000, room // (2 * 4 * dim)))
        stream = IndexStream(skew=float(rng.choice(SKEWS)))
        pooling = round(2 ** rng.uniform(0, 7))
        drawn.append(Table(name=f"t{i}", rows=rows, dim=dim, pooling=pooling, stream=stream))
        room -= drawn[-1].nbytes
    return RankingModel(batch=256, tables=tuple(drawn), bottom=(32,), top=(32,))


def any_configuration(rng: np.random.Generator) -> RankingModel:
    """Draws a model of 8 to 40 tables, 1 to 60 lookups a sample, 32 to 256 samples a rank."""
    dim = int(rng.choice([16, 32, 64]))
    wide = int(rng.choice([64, 128, 256]))
    return RankingModel(
        batch=int(2 ** rng.integers(5, 9)),
        tables=tables(rng, int(rng.integers(8, 41)), dim, (1, 60), (2.0, 5.3)),
        bottom=(wide, wide // 2),
        top=(wide, wide // 2),
        optimizer=str(rng.choice(OPTIMIZERS, p=[0.6, 0.2, 0.2])),
    )


def tables(
    rng: np.random.Generator,
    count: int,
    dim: int,
    pooling: tuple[int, int],
    log_rows: tuple[float, float],
) -> tuple[Table, ...]:
    """Draws tables with random numbers of rows (uniform in the logarithm) and lookups."""
    return tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(*log_rows)),
            dim=dim,
            pooling=int(rng.integers(pooling[0], pooling[1] + 1)),
            stream=IndexStream(skew=float(rng.choice(SKEWS))),
        )
        for i in range(count)
    )


def any_sharding(rng: np.random.Generator, model: RankingModel, ranks: int) -> Sharding:
    """Draws a sharding: mostly whole tables on random ranks, some cut, small ones replicated."""
    return tuple(_any_placement(rng, t, ranks) for t in model.tables)


def _any_placement(rng: np.random.Generator, table: Table, ranks: int) -> Placement:
    everywhere = tuple(range(ranks))
    kind = str(rng.choice(["table_wise", "column_wise", "row_wise"], p=[0.7, 0.15, 0.15]))
    if table.rows < 500 and rng.random() < 0.5:
        kind = "data_parallel"
    if kind == "table_wise":
        return Placement(kind, (int(rng.integers(ranks)),))
    if kind == "column_wise":
        order: Sequence[int] = rng.permutation(ranks).tolist()
        return Placement(kind, tuple(order[:2]))
    return Placement(kind, everywhere)
