"""Forecasts one iteration of a DLRM whose tables are sharded and whose dense part is replicated.

Every rank runs, in this order:

1. input distribution: the row numbers of its samples go to the ranks that hold the rows;
2. its shards are looked up for the samples of all ranks;
3. an all_to_all returns pooled vectors (partial sums of row-wise shards), while the bottom
   perceptron runs;
4. interaction, top perceptron and loss, and their backward pass;
5. an all_to_all sends gradients of pooled vectors back, while the bottom perceptron's backward
   pass runs;
6. gradients of the replicated part are all-reduced, which ends its backward pass (as in DDP);
7. shards are updated, then the replicated part.

A collective starts when its last rank arrives and ends for all of them. On a GPU the iteration is
no shorter than what its host takes to launch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from itercast.compose.parallel.placement import (
    INDEX_BYTES,
    Sharding,
    check_sharding,
    length_bytes,
    memory_bytes,
    message_bytes,
    shards,
)
from itercast.compose.parallel.tables import PASSES_IN_PARTS
from itercast.compose.pricing.gradient_buckets import default_contention
from itercast.compose.sharding.costs import Costs
from itercast.compose.sharding.tables import STATE_PER_WEIGHT

STEPS = (
    "distribute inputs",
    "look up",
    "wait for others' lookups",
    "exchange pooled vectors",
    "bottom perceptron",
    "top perceptron, both ways",
    "exchange gradients",
    "bottom perceptron, backward",
    "reduce gradients",
    "update tables",
    "optimizer",
    "wait for the host",
)
EXCHANGE_LAUNCHES = 8  # four copies into and out of messages, four messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingForecast:
    """One iteration under a sharding: its time, the slowest rank's steps, memory by rank.

    ``steps_us`` of the rank whose lookups and updates take longest: exposed time of each of
    ``STEPS``, which sums to ``iteration_us``. ``lookup_us``: forward and backward of its shards, by
    rank.
    """

    sharding: Sharding
    iteration_us: float
    steps_us: dict[str, float]
    lookup_us: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    fits: bool


@dataclass(slots=True)
class Traffic:
    """What ranks send and receive in an iteration, in bytes by rank, and their lookups in us."""

    index_sent: np.ndarray
    index_received: np.ndarray
    lengths_sent: np.ndarray  # of bags, ahead of the row numbers
    lengths_received: np.ndarray
    vectors_sent: np.ndarray  # pooled vectors forward; gradients of them come back
    vectors_received: np.ndarray
    forward_us: np.ndarray
    backward_us: np.ndarray
    host_us: np.ndarray  # launching lookups and updates
    replicated_bytes: float = 0.0  # gradients of data-parallel tables
    prepare_us: float = 0.0  # on every rank: choosing the row numbers that each shard gets
    join_us: float = 0.0  # on every rank: pooled vectors of all tables, in order

    @classmethod
    def none(cls, ranks: int) -> Traffic:
        """No traffic on so many ranks."""
        return cls(*np.zeros((9, ranks)))


def traffic(sharding: Sharding, costs: Costs) -> Traffic:
    """Traffic and lookups of a sharding, summed over the shards of each rank."""
    model, n = costs.model, costs.world_size
    found = Traffic.none(n)
    placed = zip(model.tables, sharding, strict=True)
    mine = [s for i, (t, p) in enumerate(placed) for s in shards(t, i, p, costs.per_node)]
    by_shard = costs.shard_costs(mine)
    for s in mine:
        table, cost = model.tables[s.table], by_shard[s]
        found.forward_us[s.rank] += cost.forward_us
        found.backward_us[s.rank] += cost.backward_us
        found.host_us[s.rank] += cost.host_us
        if s.local:
            found.replicated_bytes += table.nbytes / n
            continue
        in_parts = s.rows < table.rows
        found.prepare_us += costs.small_ops_us("sent_in_parts" if in_parts else "sent")
        if in_parts:
            all_bytes = INDEX_BYTES * model.batch * table.pooling
            found.prepare_us += costs.copy_us(PASSES_IN_PARTS * all_bytes)
            found.host_us += costs.launch_us
        found.forward_us[s.rank] += costs.small_ops_us("held")
        found.backward_us[s.rank] += costs.small_ops_us("updated")
        found.join_us += costs.small_ops_us("joined")
        index_bytes, vector_bytes = message_bytes(s, table, model.batch)
        found.index_sent += index_bytes
        found.index_received[s.rank] += n * index_bytes
        lengths = length_bytes(s, table, model.batch)
        found.lengths_sent += lengths
        found.lengths_received[s.rank] += n * lengths
        found.vectors_sent[s.rank] += n * vector_bytes
        found.vectors_received += vector_bytes
    found.backward_us[found.vectors_sent > 0] += costs.update_host_us
    return found


def forecast_sharding(sharding: Sharding, costs: Costs) -> ShardingForecast:
    """The iteration under a sharding; ValueError where it does not fit tables or ranks."""
    model, n = costs.model, costs.world_size
    check_sharding(sharding, model.tables, n, costs.per_node)
    t, dense = traffic(sharding, costs), costs.dense
    contention = default_contention(costs.target.gpu)
    slow = max(1.0, n / costs.ranks_at_once)  # ranks that share cores compute so much longer
    inputs_us, exchange_us, reduce_us = _messages_us(t, costs)
    inputs_us += slow * t.prepare_us
    copies_us = costs.copy_us(t.vectors_sent)
    bottom_us, bottom_backward_us = slow * dense.bottom_us, slow * dense.bottom_backward_us
    top_us = slow * (dense.top_us + t.join_us + _rearranging_us(t, costs))

    looked_up = inputs_us + sharing_cores(t.forward_us + copies_us, costs.ranks_at_once)
    exchanged = exchange(looked_up, exchange_us, bottom_us, contention)
    backward = exchanged + top_us
    returned = exchange(backward, exchange_us, bottom_backward_us, contention)
    reduced = returned.max() + reduce_us
    updates_us = sharing_cores(t.backward_us + copies_us, costs.ranks_at_once)
    ends = reduced + updates_us + slow * dense.update_us
    host_us = dense.host_us + t.host_us + EXCHANGE_LAUNCHES * costs.launch_us
    waits_us = max(0.0, float(host_us.max() - ends.max()))

    slowest = int(np.argmax(t.forward_us + t.backward_us + 2 * copies_us))
    waited = looked_up.max() - looked_up[slowest]
    steps = (
        inputs_us,
        looked_up[slowest] - inputs_us,
        waited,
        exchanged[slowest] - looked_up[slowest] - waited - bottom_us,
        bottom_us,
        top_us,
        returned[slowest] - backward[slowest] - bottom_backward_us,
        bottom_backward_us,
        reduced - returned[slowest],
        updates_us[slowest],
        slow * dense.update_us,
        waits_us,
    )
    state = STATE_PER_WEIGHT[model.optimizer]
    memory = memory_bytes(sharding, model.tables, state, n, costs.per_node)
    return ShardingForecast(
        sharding=sharding,
        iteration_us=float(ends.max()) + waits_us,
        steps_us={name: float(us) for name, us in zip(STEPS, steps, strict=True)},
        lookup_us=tuple(float(x) for x in t.forward_us + t.backward_us),
        memory_bytes=tuple(memory),
        fits=max(memory) <= costs.target.gpu.hbm_bytes,
    )


def _rearranging_us(t: Traffic, costs: Costs) -> float:
    """Time in us of stacking pooled vectors, and of the copies of their gradients."""
    nbytes = t.vectors_received.max()
    parts = ("joined", "gradients")
    return float(sum(costs.rearranging_us(part, nbytes) for part in parts))


def _messages_us(t: Traffic, costs: Costs) -> tuple[float, float, float]:
    """Time in us of sending row numbers, of sending pooled vectors, and of the all_reduce.

    An all_to_all takes as long as the most that any rank sends or receives. Lengths of bags go
    ahead of row numbers: they say how many there are.
    """
    lengths = np.maximum(t.lengths_sent, t.lengths_received).max()
    index_bytes = np.maximum(t.index_sent, t.index_received).max()
    vector_bytes = np.maximum(t.vectors_sent, t.vectors_received).max()
    return (
        costs.copy_us(lengths + index_bytes)
        + costs.rearranging_us("row_numbers", t.index_received.max())
        + costs.message_us("all_to_all", lengths)
        + costs.message_us("all_to_all", index_bytes),
        costs.message_us("all_to_all", vector_bytes),
        costs.dense.reduce_us + costs.message_us("all_reduce", t.replicated_bytes),
    )


def sharing_cores(work_us: np.ndarray, at_once: float) -> np.ndarray:
    """When each rank's work ends, in us, on cores that run only ``at_once`` ranks at full speed.

    ``work_us``: time of each rank's work if it ran alone; all start at 0. While more ranks than
    ``at_once`` run, each gets an equal share of the cores.
    """
    order = np.argsort(work_us)
    steps_us = np.diff(work_us[order], prepend=0.0)
    running = len(work_us) - np.arange(len(work_us))
    ends_us = np.empty(len(work_us))
    ends_us[order] = np.cumsum(steps_us * np.maximum(1.0, running / at_once))
    return ends_us


def exchange(
    ready_us: np.ndarray, message_us: float, compute_us: np.ndarray | float, contention: float
) -> np.ndarray:
    """Return when each rank has finished both a collective and its own compute, in us.

    A rank's compute starts when that rank is ready, the collective when all ranks are. While both
    run, each proceeds at 1/contention of its speed. Arrays are by rank.
    """
    start_us = ready_us.max()
    left_us = np.maximum(0.0, compute_us - (start_us - ready_us))
    both_us = np.minimum(left_us, message_us)
    return np.asarray(start_us + np.maximum(left_us, message_us) + (contention - 1) * both_us)


def forecast_all(shardings: Sequence[Sharding], costs: Costs) -> list[ShardingForecast]:
    """Forecasts of many shardings, fastest first; those that do not fit the memory come last."""
    found = [forecast_sharding(s, costs) for s in shardings]
    return sorted(found, key=lambda f: (not f.fits, f.iteration_us))
