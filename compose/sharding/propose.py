"""Proposes shardings: at random, greedily by several costs, by torchrec's formulas, by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from itercast.compose.parallel.greedy import MIN_COLUMNS, Way, balanced, greedy, placements
from itercast.compose.parallel.placement import (
    Placement,
    Shard,
    Sharding,
    Table,
    message_bytes,
    shards,
)
from itercast.compose.sharding.costs import Costs
from itercast.compose.sharding.forecast import ShardingForecast, forecast_sharding
from itercast.compose.sharding.tables import STATE_PER_WEIGHT, RankingModel
from itercast.microbench.assumptions import assumed

DIM_PENALTY: Mapping[int, float] = assumed(__file__, "dim_penalty")
RANDOM = 8  # random shardings proposed
SWEEPS = 4  # changes of a search, per table
TRIED = 12  # changed shardings that are forecast before the best of them is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A sharding and the name of the rule that proposed it."""

    name: str
    sharding: Sharding


def table_costs(costs: Costs) -> Mapping[str, Callable[[Table], float]]:
    """Returns the costs that greedy rules balance: by name, a function from a table to a number.

    ``lookups`` is the work of a batch, pooling * dim; ``size_lookup`` is that times the logarithm
    of the rows. Source: arXiv 2208.06399.
    """
    return {
        "size": lambda t: float(t.nbytes),
        "rows": lambda t: float(t.rows),
        "lookups": lambda t: t.pooling * t.dim,
        "size_lookup": lambda t: t.pooling * t.dim * float(np.log10(1 + t.rows)),
        "torchrec": lambda t: torchrec_us(t, costs),
        "forecast": _forecast_us(costs),
    }


def _forecast_us(costs: Costs) -> Callable[[Table], float]:
    """Forecast of a whole table's lookup, gradient, update and messages on one rank, in us."""
    where = Placement("table_wise", (0,))
    whole = {t.name: shards(t, i, where, 1)[0] for i, t in enumerate(costs.model.tables)}
    us = dict(zip(whole, _shard_us(list(whole.values()), costs), strict=True))
    return lambda t: us[t.name]


def _shard_us(held: Sequence[Shard], costs: Costs) -> list[float]:
    """Forecast of what each shard adds to its rank, in us: lookup, gradient, update, messages.

    Row numbers of the other ranks' samples come, their vectors go, as many gradients come back.
    """
    prices, found = costs.shard_costs(list(held)), []
    byte_us = 1e6 * (costs.world_size - 1) / costs.where.slowest_bytes_per_s("dp")
    for shard in held:
        numbers, vectors = message_bytes(shard, costs.model.tables[shard.table], costs.model.batch)
        price = prices[shard]
        found.append(price.forward_us + price.backward_us + byte_us * (numbers + 2 * vectors))
    return found


def cut_until_even(costs: Costs) -> Sharding:
    """Tables spread by the time that shards add, cut while the slowest rank gets faster."""
    model, n, per_node = costs.model, costs.world_size, costs.per_node
    places = [list(placements(t, n, per_node)) for t in model.tables]
    first = [shards(t, i, p, per_node)[0] for i, t in enumerate(model.tables) for p in places[i]]
    us = iter(_shard_us(first, costs))
    ways = [[Way(place, next(us)) for place in mine] for mine in places]
    state = STATE_PER_WEIGHT[model.optimizer]
    return balanced(model.tables, ways, n, per_node, costs.book.gpu.hbm_bytes, state)


def torchrec_us(table: Table, costs: Costs) -> float:
    """Cost in us of a whole table on one rank, by the formula of torchrec's planner.

    With W ranks, I lookups and O pooled vectors of a rank's batch, D columns of b bytes: forward
    compute (8 I W + I W max(D, 32) b + O W D b) * penalty / HBM bandwidth, backward twice that;
    forward and backward exchange O W D b / link bandwidth each. The penalty depends on D.
    """
    w, b = costs.world_size, table.row_bytes / table.dim
    i, o = costs.model.batch * table.pooling, costs.model.batch
    penalty = next(
        p for least, p in sorted(DIM_PENALTY.items(), reverse=True) if table.dim >= least
    )
    moved = 8 * i * w + i * w * max(table.dim, 32) * b + o * w * table.dim * b
    compute_s = moved * penalty / costs.book.gpu.hbm_bytes_per_s
    exchange_s = o * w * table.dim * b / costs.where.slowest_bytes_per_s("dp")
    return 1e6 * (3 * compute_s + 2 * exchange_s)


def greedy_by(cost: Callable[[Table], float], costs: Costs, parts: int = 1) -> Sharding:
    """Gives each table, by falling cost, to the rank with the least cost so far (``greedy``)."""
    model, state = costs.model, STATE_PER_WEIGHT[costs.model.optimizer]
    by_table = [cost(t) for t in model.tables]
    limit_bytes = costs.book.gpu.hbm_bytes
    return greedy(model.tables, by_table, costs.world_size, limit_bytes, state, parts)


def random_sharding(rng: np.random.Generator, model: RankingModel, ranks: int) -> Sharding:
    """Places each table as a whole on a random rank."""
    return tuple(
        Placement("table_wise", (int(r),)) for r in rng.integers(ranks, size=len(model.tables))
    )


def proposals(costs: Costs, seed: int = 0) -> Iterator[Proposal]:
    """Yields the sharding of every rule but the search, which starts from the fastest of these."""
    model, n = costs.model, costs.world_size
    if n == 1:
        yield Proposal(name="one rank", sharding=_everywhere(model, "table_wise", 1))
        return
    rng = np.random.default_rng(seed)
    for i in range(RANDOM):
        yield Proposal(name=f"random {i}", sharding=random_sharding(rng, model, n))
    for name, cost in table_costs(costs).items():
        yield Proposal(name=f"greedy by {name}", sharding=greedy_by(cost, costs))
    cost = table_costs(costs)["forecast"]
    for parts in [p for p in (2, 4, 8) if p <= n]:
        cut = greedy_by(cost, costs, parts)
        yield Proposal(name=f"greedy, cut in {parts} columns", sharding=cut)
    yield Proposal(name="greedy, cut until even", sharding=cut_until_even(costs))
    yield Proposal(name="all row-wise", sharding=_everywhere(model, "row_wise", n))
    yield Proposal(name="all data-parallel", sharding=_everywhere(model, "data_parallel", n))


def _everywhere(model: RankingModel, kind: str, ranks: int) -> Sharding:
    return tuple(Placement(kind, tuple(range(ranks))) for _ in model.tables)


def improve(start: ShardingForecast, costs: Costs) -> ShardingForecast:
    """Local search: takes the best of the TRIED most balanced changes until none is better.

    A change gives a table of the slowest rank another placement, or swaps it with a whole table of
    another rank. Better is a smaller ``_score``.
    """
    best = start
    for _ in range(SWEEPS * len(costs.model.tables)):
        tried = [forecast_sharding(s, costs) for s in _balanced(best, costs)]
        better = min(tried, key=_score, default=best)
        if _score(better) >= _score(best):
            return best
        best = better
    return best


def _score(found: ShardingForecast) -> tuple[bool, float, float]:
    """What the search minimises: whether memory overflows, then iteration, then slowest lookups."""
    return not found.fits, found.iteration_us, max(found.lookup_us)


def _balanced(found: ShardingForecast, costs: Costs) -> list[Sharding]:
    """The TRIED changes of a sharding whose fullest rank has the least load.

    Load is the time of lookups and updates, or bytes while the sharding does not fit the memory.
    """
    sharding = found.sharding
    loads = [_load(i, place, costs, found.fits) for i, place in enumerate(sharding)]
    total = sum(loads, np.zeros(costs.world_size))
    fullest, idle = int(np.argmax(total)), [int(r) for r in np.argsort(total)]
    scored: list[tuple[float, float, dict[int, Placement]]] = []

    def add(changed: dict[int, Placement]) -> None:
        after = total + sum(
            _load(i, place, costs, found.fits) - loads[i] for i, place in changed.items()
        )
        scored.append((float(after.max()), float(np.square(after).sum()), changed))

    mine = [i for i in range(len(sharding)) if loads[i][fullest] > 0]
    for i in mine:
        for place in _moves(i, costs, idle):
            if place != sharding[i]:
                add({i: place})
        for other, place in enumerate(sharding):
            if {place.kind, sharding[i].kind} == {"table_wise"} and place != sharding[i]:
                add({i: place, other: sharding[i]})
    best = sorted(scored, key=lambda one: one[:2])[:TRIED]
    return [
        tuple(changed.get(i, place) for i, place in enumerate(sharding)) for *_, changed in best
    ]


def _load(number: int, place: Placement, costs: Costs, in_time: bool) -> np.ndarray:
    """By rank, the time in us of a placed table's lookups and updates, or its bytes."""
    key = (number, place, in_time)
    if key not in costs.loads:
        table, load = costs.model.tables[number], np.zeros(costs.world_size)
        held = shards(table, number, place, costs.per_node)
        prices = costs.shard_costs(held)
        for s in held:
            us = prices[s].forward_us + prices[s].backward_us
            load[s.rank] += us if in_time else s.rows * s.columns
        costs.loads[key] = load
    return costs.loads[key]


def _moves(number: int, costs: Costs, idle: Sequence[int]) -> Iterator[Placement]:
    """Placements of a table: whole, cut over the ``idle`` ranks first, in rows, copies."""
    table, n, per_node = costs.model.tables[number], costs.world_size, costs.per_node
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
    costs: Costs, seed: int = 0, given: Sharding | None = None
) -> list[tuple[str, ShardingForecast]]:
    """Forecasts all proposals and the ``given`` sharding, by name; fastest first.

    "search" is the better of two local searches: from the fastest proposal, and from the fastest
    that cuts no table. Shardings that do not fit the memory come last.
    """
    found = [(p.name, forecast_sharding(p.sharding, costs)) for p in proposals(costs, seed)]
    if given is not None:
        found.append(("given", forecast_sharding(given, costs)))
    order = sorted(found, key=_rank_key)
    if costs.world_size > 1:
        whole = [f for _, f in order if {p.kind for p in f.sharding} == {"table_wise"}]
        starts = {f.sharding: f for f in (order[0][1], *whole[:1])}
        searched = min((improve(f, costs) for f in starts.values()), key=_score)
        order = sorted([*order, ("search", searched)], key=_rank_key)
    return order


def _rank_key(entry: tuple[str, ShardingForecast]) -> tuple[bool, float]:
    return not entry[1].fits, entry[1].iteration_us
