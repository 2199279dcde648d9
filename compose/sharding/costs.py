"""Prices the pieces of a sharded model's iteration: lookups of a shard, messages, dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.compose.capture_model import capture
from itercast.compose.graph.cache_reuse import cold_share
from itercast.compose.parallel.placement import Shard, Sharding, shards
from itercast.compose.parallel.plan import ParallelPlan
from itercast.compose.parallel.tables import PASSES, SMALL_OPS
from itercast.compose.pricing.collectives import Message, cluster, price_messages
from itercast.compose.pricing.host import host_cost
from itercast.compose.pricing.price_book import Priceable, PriceBook, price_book
from itercast.compose.sharding.tables import RankingModel
from itercast.compose.target import Target, forecast_step
from itercast.microbench.opcall import StepCapture
from itercast.microbench.ops import families
from itercast.microbench.ops.lookup.embedding_bag import EmbeddingBag
from itercast.microbench.ops.lookup.random_streams import unique_rows
from itercast.microbench.ops.lookup.sparse_update import SparseUpdate
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.step.host import REPEATED

MODES = ("train", "infer")
OPTIMIZER = {"adagrad": "adamw", "adam": "adamw"}  # of the dense part
UPDATE_PASSES = {"sgd": 3, "adamw": 7}  # over weights, gradient and state of a local copy
GRID_BYTES = 2.0 ** np.arange(8, 33, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """Time in us of a shard's lookup, and of its gradient with the optimizer's update.

    ``host_us``: what a GPU's host takes to launch them.
    """

    forward_us: float
    backward_us: float
    host_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCost:
    """Time in us of the data-parallel part of a rank's step.

    ``bottom_us`` is the forward pass of the bottom perceptron, ``bottom_backward_us`` its backward
    pass; ``top_us`` is all between them, ``update_us`` the optimizer; ``reduce_us`` the all_reduce
    of gradients. ``host_us`` is what a GPU's host takes to launch all of it.
    """

    bottom_us: float
    top_us: float
    bottom_backward_us: float
    update_us: float
    reduce_us: float
    host_us: float


class Costs:
    """Prices of one model on one target with so many ranks; each is computed once."""

    def __init__(self, model: RankingModel, target: Target, world_size: int) -> None:
        plan = ParallelPlan(dp=world_size, node=target.plan.node)
        threads = max(1, target.gpu.sm_count // world_size) if target.gpu.kind == "cpu" else 0
        self.model, self.world_size = model, world_size
        self.target = replace(target, plan=plan, threads=threads)
        self.book: PriceBook = price_book(
            target.bundle, target.gpu, threads, target.stack, target.host
        )
        self.where = cluster(plan, target.gpu, target.node)
        self.per_node = self.where.gpus_per_node
        cores = target.gpu.sm_count if target.gpu.kind == "cpu" else 0
        self.ranks_at_once = cores / threads if cores else float(world_size)
        on_gpu = target.gpu.kind != "cpu"
        self.launch_us = host_cost({"launch": 1}, self.book).duration_us if on_gpu else 0.0
        self.repeated_us, self.update_host_us = 0.0, 0.0
        if not on_gpu:  # the tables' own backward pass; sparse Adam and Adagrad hold their Python
            self.repeated_us = host_cost({REPEATED: 1}, self.book).duration_us
            steps = (
                {"sgd_step": len(model.tables) // world_size} if model.optimizer == "sgd" else {}
            )
            self.update_host_us = host_cost({"backward": 1, **steps}, self.book).duration_us
        self.dense = _dense_cost(model, self.target)
        # A CPU runs a rank's tables one after the other, which points of several tables measure.
        self.tables = max(1, round(len(model.tables) / world_size)) if cores else 1
        # Their rows have left its core's own caches; how long that takes, cold points measure.
        touched = _touched_bytes(model, world_size)
        self.cold = 1.0 if cores else cold_share(target.gpu)(touched)
        self.known: dict[Any, ShardCost] = {}
        self.loads: dict[Any, np.ndarray] = {}  # by table and placement, see ``propose``
        self.curves: dict[str, np.ndarray] = {}  # logarithms of us at GRID_BYTES

    def shard_costs(self, wanted: Sequence[Shard]) -> Mapping[Shard, ShardCost]:
        """Cost of each shard; all that are not known yet are priced in one call per family."""
        keys = {s: self._key(s) for s in wanted}
        fresh = list(dict.fromkeys(k for k in keys.values() if k not in self.known))
        if fresh:
            ops = [self._ops(*key) for key in fresh]
            priced = self.book.price([op for mine in ops for op in mine])
            at = 0
            for key, mine in zip(fresh, ops, strict=True):
                own = priced[at : at + len(mine)]
                times = [max(p.duration_us, p.launch_us or 0.0) for p in own]
                at += len(mine)
                self.known[key] = ShardCost(
                    forward_us=times[0],
                    backward_us=sum(times[1:]),
                    host_us=sum(p.launch_us or self.launch_us * p.call_launches for p in own),
                )
        return {s: self.known[key] for s, key in keys.items()}

    def costliest_table(self, sharding: Sharding, lookup_us: Sequence[float]) -> tuple[str, float]:
        """Name of the table that the slowest rank spends most time on, and that time in us."""
        slowest = int(np.argmax(lookup_us))
        placed = zip(self.model.tables, sharding, strict=True)
        held = [s for i, (t, p) in enumerate(placed) for s in shards(t, i, p, self.per_node)]
        costs = self.shard_costs([s for s in held if s.rank == slowest])
        us = {s: cost.forward_us + cost.backward_us for s, cost in costs.items()}
        most = max(us, key=lambda s: us[s])
        return self.model.tables[most.table].name, us[most]

    def _key(self, s: Shard) -> tuple[int, int, int, bool]:
        """Table, rows, columns, and whether the batch is one rank's own."""
        return s.table, s.rows, s.columns, s.local

    def _ops(self, number: int, rows: int, columns: int, local: bool) -> list[Priceable]:
        """Forward lookup, then the sparse gradient and the optimizer's step on it.

        A part of the rows gets that part of the lookups; sample counts are those of all ranks. The
        gradient of a local copy is dense, and added to all rows.
        """
        table = self.model.tables[number]
        batch = self.model.batch * (1 if local else self.world_size)
        lookups = max(1, round(batch * table.pooling * rows / table.rows))
        stream = {k: v for k, v in table.stream.facts(table.rows, batch).items() if k != "lookups"}
        if rows < table.rows and "unique" in stream:
            stream["unique"] = max(1, round(stream["unique"] * rows / table.rows))
        bag = EmbeddingBag(
            op="forward",
            rows=rows,
            dim=columns,
            bags=batch,
            lookups=lookups,
            dtype=table.dtype,
            weighted=table.weighted,
            tables=1 if local else self.tables,
            **stream,
        )
        forward = _priceable("embedding_bag", bag, self.cold)
        if local:
            passes = UPDATE_PASSES[OPTIMIZER.get(self.model.optimizer, self.model.optimizer)]
            added = memory_copy(passes * rows * columns * table.row_bytes / table.dim)
            back = _priceable("embedding_bag", replace(bag, op="backward"), self.cold)
            return [forward, back, _priceable(added.family, added.params, self.cold)]
        gradient = replace(bag, op="sparse_backward")
        update = SparseUpdate(
            op=self.model.optimizer,
            rows=rows,
            dim=columns,
            lookups=lookups,
            dtype=table.dtype,
            tables=self.tables,
            **{name: value for name, value in stream.items() if name != "spread"},
        )
        return [
            forward,
            _priceable("embedding_bag", gradient, self.cold),
            _priceable("sparse_update", update, self.cold),
        ]

    def copy_us(self, nbytes: Any) -> Any:
        """Time of copying so many bytes in memory: read and written once; numpy arrays too."""
        return self._interpolated("copy", nbytes)

    def rearranging_us(self, part: str, nbytes: Any) -> Any:
        """Time of the copies that ``PASSES`` counts, of so many bytes each; none on a GPU."""
        on_cpu = self.book.gpu.kind == "cpu"
        return PASSES[part] * self.copy_us(nbytes) if on_cpu else 0.0 * np.asarray(nbytes)

    def small_ops_us(self, kind: str) -> float:
        """Host time of a CPU's small ops (``SMALL_OPS`` of them per table), 0 on a GPU."""
        if self.book.gpu.kind != "cpu":
            return 0.0
        return SMALL_OPS[kind] * self.repeated_us

    def message_us(self, kind: str, nbytes: float) -> float:
        """Time of a collective of all ranks on a buffer of so many bytes on each."""
        return 0.0 if self.world_size == 1 else float(self._interpolated(kind, nbytes))

    def _interpolated(self, kind: str, nbytes: Any) -> Any:
        """Time by size, linear between prices of ``GRID_BYTES`` on logarithmic axes; 0 for none."""
        if kind not in self.curves:
            self.curves[kind] = np.log(self._prices(kind))
        logs = np.log(np.maximum(nbytes, 1.0))
        inside = np.interp(logs, np.log(GRID_BYTES), self.curves[kind])
        beyond = np.maximum(0.0, logs - np.log(GRID_BYTES[-1]))  # in proportion to the size
        return np.where(np.asarray(nbytes) > 0, np.exp(inside + beyond), 0.0)

    def _prices(self, kind: str) -> list[float]:
        sizes = [int(size) for size in GRID_BYTES]
        if kind == "copy":
            parts = [memory_copy(2.0 * size) for size in sizes]
            ops = self.book.price([_priceable(p.family, p.params, 1.0) for p in parts])
        else:
            messages = [Message(kind=kind, axis="dp", message_bytes=size) for size in sizes]
            ops = price_messages(messages, self.book, self.where)
        return [max(1e-3, op.duration_us) for op in ops]


def _touched_bytes(model: RankingModel, world_size: int) -> float:
    """Bytes of all tables that a step touches, per rank: they decide which rows stay in the cache.

    Sum over tables of (distinct rows + 2 * lookups) * bytes of a row: rows are looked up, their
    sparse gradient is written and read.
    """
    found = 0.0
    for table in model.tables:
        batch = model.batch * world_size
        facts: dict[str, Any] = {"lookups": max(1, round(batch * table.pooling))}
        facts |= table.stream.facts(table.rows, batch)
        bag = EmbeddingBag(op="forward", rows=table.rows, dim=table.dim, bags=batch, **facts)
        found += (float(unique_rows(bag)) + 2 * bag.lookups) * table.row_bytes
    return found / world_size


def _priceable(family: str, params: Any, cold: float) -> Priceable:
    return Priceable(
        op=f"{family}.{params.op}",
        phase="forward",
        family=families()[family],
        params=params,
        bytes_moved=float(families()[family].bytes_moved(params)),
        cold=cold,
    )


def _dense_cost(model: RankingModel, target: Target) -> DenseCost:
    """Cost of perceptrons and interaction: differences of forecasts with and without a part."""
    alone = replace(target, plan=ParallelPlan())
    whole, without_update = dense_step(model, model.optimizer), dense_step(model, "none")
    bottom_us = {m: forecast_step(_bottom_step(model, m), alone).iteration_us for m in MODES}
    found = forecast_step(whole, alone)
    host_us = found.host_us if target.gpu.kind != "cpu" else 0.0  # a CPU's is in its ops
    without_us = forecast_step(without_update, alone).iteration_us
    return DenseCost(
        bottom_us=bottom_us["infer"],
        bottom_backward_us=max(0.0, bottom_us["train"] - bottom_us["infer"]),
        top_us=max(0.0, without_us - bottom_us["train"]),
        update_us=max(0.0, found.iteration_us - without_us),
        reduce_us=forecast_step(whole, target).comm_us,
        host_us=host_us,
    )


def dense_step(model: RankingModel, optimizer: str) -> StepCapture:
    """The captured step of the two perceptrons and the interaction."""
    from torch import float32, zeros  # torch is slow to import, and priced tables need none
    from torch.nn.functional import binary_cross_entropy_with_logits as loss

    from itercast.microbench.cases.models.dlrm import DenseDlrm

    module = DenseDlrm(
        features=model.features,
        bottom=model.bottom,
        tables=len(model.tables),
        width=model.dim,
        top=model.top,
    )
    inputs = {
        "dense": zeros(model.batch, model.features, dtype=float32),
        "pooled": zeros(model.batch, len(model.tables), model.dim, dtype=float32),
    }
    return capture(
        module,
        inputs,
        lambda x: loss(x, zeros(x.shape)),
        optimizer=OPTIMIZER.get(optimizer, optimizer),
    )


def _bottom_step(model: RankingModel, mode: str) -> StepCapture:
    from torch import float32, zeros  # as above

    from itercast.microbench.cases.models.small import Perceptron

    module = Perceptron((model.features, *model.bottom, model.dim))
    inputs = zeros(model.batch, model.features, dtype=float32)
    return capture(module, inputs, "none", mode=mode, optimizer="none")
