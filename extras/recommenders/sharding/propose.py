"""Proposes shardings: at random, greedily by several costs, by torchrec's formulas, by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.extras.recommenders.sharded_model import RankingModel, Table
from itercast.extras.recommenders.sharding.forecast import Forecaster, ShardingForecast
from itercast.extras.recommenders.tables.greedy import MIN_COLUMNS, greedy
from itercast.extras.recommenders.tables.placement import HBM, Placement, Sharding

DIM_PENALTY: Mapping[int, float] = assumed(__file__, "dim_penalty")
RANDOM = 8  # random shardings proposed
SWEEPS = 4  # changes of a search, per table
TRIED = 12  # changed shardings that are forecast before the best of them is taken


def table_costs(forecaster: Forecaster) -> Mapping[str, Callable[[Table], float]]:
    """Returns the costs that greedy rules balance: by name, a function from a table to a number.

    ``lookups`` is the work of a batch, pooling * dim; ``size_lookup`` is that times the logarithm
    of the rows. Source: arXiv 2208.06399.
    """
    return {
        "size": lambda t: float(t.nbytes),
        "rows": lambda t: float(t.rows),
        "lookups": lambda t: t.pooling * t.dim,
        "size_lookup": lambda t: t.pooling * t.dim * float(np.log10(1 + t.rows)),
        "torchrec": lambda t: torchrec_us(t, forecaster),
        "forecast": _forecast_us(forecaster),
    }


def _forecast_us(forecaster: Forecaster) -> Callable[[Table], float]:
    """Forecast of a whole table's lookup, gradient, update and messages on one rank, in us."""
    cluster, times = Placement("table_wise", (0,)), forecaster.times
    whole = [times.placed(i, cluster)[0] for i in range(len(forecaster.tables))]
    names = [t.name for t in forecaster.model.tables]
    us = {name: time.total_us for name, time in zip(names, times.of(whole), strict=True)}
    return lambda t: us[t.name]


def torchrec_us(table: Table, forecaster: Forecaster) -> float:
    """Cost in us of a whole table on one rank, by the formula of torchrec's planner.

    With W ranks, I lookups and O pooled vectors of a rank's batch, D columns of b bytes: forward
    compute (8 I W + I W max(D, 32) b + O W D b) * penalty / HBM bandwidth, backward twice that;
    forward and backward exchange O W D b / link bandwidth each. The penalty depends on D.
    """
    w, b = forecaster.world_size, table.row_bytes / table.dim
    i, o = forecaster.model.batch * table.pooling, forecaster.model.batch
    penalty = next(
        p for least, p in sorted(DIM_PENALTY.items(), reverse=True) if table.dim >= least
    )
    moved = 8 * i * w + i * w * max(table.dim, 32) * b + o * w * table.dim * b
    compute_s = moved * penalty / forecaster.book.gpu.hbm_bytes_per_s
    exchange_s = o * w * table.dim * b / forecaster.cluster.slowest_bytes_per_s("tables")
    return 1e6 * (3 * compute_s + 2 * exchange_s)


def greedy_by(cost: Callable[[Table], float], forecaster: Forecaster, parts: int = 1) -> Sharding:
    """Gives each table, by falling cost, to the rank with the least cost so far (``greedy``)."""
    model = forecaster.model
    by_table = [cost(t) for t in model.tables]
    room = forecaster.room_bytes
    return greedy(model.tables, by_table, forecaster.world_size, room, model.state, parts)


def random_sharding(rng: np.random.Generator, model: RankingModel, ranks: int) -> Sharding:
    """Places each table as a whole on a random rank."""
    return tuple(
        Placement("table_wise", (int(r),)) for r in rng.integers(ranks, size=len(model.tables))
    )


def proposals(forecaster: Forecaster, seed: int) -> dict[str, Sharding]:
    """By rule the sharding of each but the search, which starts from the fastest of these."""
    model, n = forecaster.model, forecaster.world_size
    if n == 1:
        return {"one rank": everywhere(model, "table_wise", 1)}
    rng, costs = np.random.default_rng(seed), table_costs(forecaster)
    proposed = {f"random {i}": random_sharding(rng, model, n) for i in range(RANDOM)}
    proposed |= {f"greedy by {name}": greedy_by(cost, forecaster) for name, cost in costs.items()}
    for parts in [p for p in (2, 4, 8) if p <= n]:
        cut = greedy_by(costs["forecast"], forecaster, parts)
        proposed[f"greedy, cut in {parts} columns"] = cut
    return {
        **proposed,
        "greedy, cut until even": forecaster.times.greedy(model.state),
        "all row-wise": everywhere(model, "row_wise", n),
        "all data-parallel": everywhere(model, "data_parallel", n),
    }


def everywhere(model: RankingModel, kind: str, ranks: int) -> Sharding:
    """Cuts every table over all ranks, or copies it to them."""
    return tuple(Placement(kind, tuple(range(ranks))) for _ in model.tables)


def improve(start: ShardingForecast, forecaster: Forecaster) -> ShardingForecast:
    """Local search: takes the best of the TRIED most balanced changes until none is better.

    A change gives a table of the slowest rank another placement, or swaps it with a whole table of
    another rank. Better is a smaller ``_score``.
    """
    best = start
    for _ in range(SWEEPS * len(forecaster.model.tables)):
        tried = forecaster.forecasts(_balanced(best, forecaster))
        better = min(tried, key=_score, default=best)
        if _score(better) >= _score(best):
            return best
        best = better
    return best


def _score(forecast: ShardingForecast) -> tuple[bool, float, float]:
    """What the search minimises: whether memory overflows, then iteration, then slowest lookups."""
    return not forecast.fits, forecast.iteration_us, max(forecast.lookup_us)


def _balanced(forecast: ShardingForecast, forecaster: Forecaster) -> list[Sharding]:
    """The TRIED changes of a sharding that leave the least load on the fullest rank.

    Load is the time of lookups and updates, or bytes while the sharding does not fit the memory.
    """
    sharding = forecast.sharding
    loads = [_load(i, place, forecaster, forecast.fits) for i, place in enumerate(sharding)]
    total = sum(loads, np.zeros(forecaster.world_size))
    fullest, idle = int(np.argmax(total)), [int(r) for r in np.argsort(total)]
    scored: list[tuple[float, float, dict[int, Placement]]] = []

    def add(changed: dict[int, Placement]) -> None:
        after = total + sum(
            _load(i, place, forecaster, forecast.fits) - loads[i] for i, place in changed.items()
        )
        scored.append((float(after.max()), float(np.square(after).sum()), changed))

    mine = [i for i in range(len(sharding)) if loads[i][fullest] > 0]
    for i in mine:
        for move in _moves(i, forecaster, idle):
            kept = sharding[i]
            copies = move.kind == "data_parallel"
            place = move if copies else replace(move, tier=kept.tier, cached=kept.cached)
            if place != sharding[i]:
                add({i: place})
        for other, place in enumerate(sharding):
            if {place.kind, sharding[i].kind} == {"table_wise"} and place != sharding[i]:
                add({i: place, other: sharding[i]})
    best = sorted(scored, key=lambda one: one[:2])[:TRIED]
    return [
        tuple(changed.get(i, place) for i, place in enumerate(sharding)) for *_, changed in best
    ]


def _load(number: int, place: Placement, forecaster: Forecaster, in_time: bool) -> np.ndarray:
    """By rank, the time in us that a placed table adds, or its bytes."""
    load, held = np.zeros(forecaster.world_size), forecaster.times.placed(number, place)
    for shard, time in zip(held, forecaster.times.of(held), strict=True):
        load[shard.rank] += time.total_us if in_time else shard.cached * shard.rows * shard.columns
    return load


def _moves(number: int, forecaster: Forecaster, idle: Sequence[int]) -> Iterator[Placement]:
    """Placements of a table: whole, cut over the ``idle`` ranks first, in rows, copies."""
    table, n, per_node = forecaster.model.tables[number], forecaster.world_size, forecaster.per_node
    for rank in range(n):
        yield Placement("table_wise", (rank,))
    for parts in (2, 4, 8):
        if parts <= n and table.dim % parts == 0 and table.dim // parts >= MIN_COLUMNS:
            yield Placement("column_wise", tuple(idle[:parts]))
    for kind in ("row_wise", "data_parallel"):
        yield Placement(kind, tuple(range(n)))
    nodes = n // per_node
    if nodes > 1 and n % per_node == 0:
        for node in range(nodes):
            yield Placement("table_row_wise", tuple(range(node * per_node, (node + 1) * per_node)))
        if table.dim % nodes == 0:
            yield Placement("grid_shard", tuple(range(n)))


def choose(
    forecaster: Forecaster, seed: int = 0, given: Sharding | None = None
) -> list[tuple[str, ShardingForecast]]:
    """Forecasts all proposals and the ``given`` sharding, by name; fastest first.

    "search" is the better of two local searches: from the fastest proposal, and from the fastest
    that cuts no table. Where none fits the GPUs' memory, tables go to the hosts'. Shardings that do
    not fit come last.
    """
    proposed = proposals(forecaster, seed) | ({} if given is None else {"given": given})
    forecasts = forecaster.forecasts([*proposed.values()])
    if not any(f.fits and all(p.tier == HBM for p in f.sharding) for f in forecasts):
        proposed = dict(_cached(*named, forecaster) for named in proposed.items())
        forecasts = forecaster.forecasts([*proposed.values()])
    order = sorted(zip(proposed, forecasts, strict=True), key=_rank_key)
    if forecaster.world_size > 1:
        whole = [f for _, f in order if {p.kind for p in f.sharding} == {"table_wise"}]
        starts = {f.sharding: f for f in (order[0][1], *whole[:1])}
        searched = min((improve(f, forecaster) for f in starts.values()), key=_score)
        order = sorted([*order, ("search", searched)], key=_rank_key)
    return order


def _cached(name: str, sharding: Sharding, forecaster: Forecaster) -> tuple[str, Sharding]:
    """The named sharding with as many rows in host memory as its GPUs do not hold."""
    found = forecaster.times.tiered(sharding, forecaster.model.state, forecaster.room_bytes)
    return name + ", host" * (found != sharding), found


def _rank_key(entry: tuple[str, ShardingForecast]) -> tuple[bool, float]:
    return not entry[1].fits, entry[1].iteration_us
