"""Random DLRMs to forecast and to measure on this CPU, with tables as large as it can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from itercast.compose.tables.placement import Placement, Sharding
from itercast.extras.recommenders.sharding.tables import OPTIMIZERS
from itercast.microbench.iterations.sharded_model import RankingModel, Table
from itercast.microbench.ops.lookup.index_streams import IndexStream

SKEWS = (0.0, 0.8, 1.05, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sharding of a model, and the rule that proposed it."""

    name: str
    model: RankingModel
    sharding: Sharding


def heavy_task(rng: np.random.Generator) -> RankingModel:
    """Draws a model of 36 to 66 tables with 20 lookups a sample or more, as in arXiv 2404.12674.

    Batch and rows are smaller than there, to fit a CPU: 256 samples a rank, 1,000 to 200,000 rows
    of 16 or 32 columns.
    """
    dim = int(rng.choice([16, 32]))
    return RankingModel(
        batch=256,
        tables=tables(rng, int(rng.integers(36, 67)), dim, (20, 60), (3.0, 5.3)),
        bottom=(128, 64),
        top=(128, 64),
    )


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
