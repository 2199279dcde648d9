"""Forecasts one iteration of a DLRM under many shardings of its tables.

The step is captured with its tables and rewritten for a rank as under a plan with ``shard``
(``itercast.compose.parallel.tables``), once for every set of tables that are copied. A sharding
gives other times to the parts that tables add to the step; then the same rank is simulated. Sizes
of copies and messages are rounded to a grid, so that few are priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp2, log2

from itercast.compose.forecast import rank_of
from itercast.compose.graph.identity_cache import Once
from itercast.compose.parallel.placement import Placement, Sharding, check_sharding, memory_bytes
from itercast.compose.parallel.table_work import PHASES, TableWork, held_shards, table_work
from itercast.compose.parallel.tables import rank_step
from itercast.compose.pricing.collectives import (
    Message,
    cluster,
    default_contention,
    price_messages,
)
from itercast.compose.pricing.host import Launches, host_cost
from itercast.compose.pricing.layer_prices import PricedModel, price_model
from itercast.compose.pricing.price_book import PriceBook, PricedOp, price_book, priceable
from itercast.compose.pricing.rank_graph import until_read
from itercast.compose.pricing.sharded_tables import ShardTimes
from itercast.compose.pricing.work import side_by_side_us
from itercast.compose.sharding.step import dlrm_step, tables_of
from itercast.compose.sharding.tables import STATE_PER_WEIGHT, RankingModel
from itercast.compose.simulate.iteration import Outcome, evaluate
from itercast.compose.target import Target
from itercast.microbench.opcall import OpCall, TensorSpec
from itercast.microbench.ops.step.host import REPEATED
from itercast.microbench.plan import ParallelPlan

BESIDE = {"send vectors": "bottom perceptron", "send gradients": "bottom perceptron, backward"}
STEPS = (
    "distribute inputs",
    "look up",
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
GRID = 16  # sizes that are priced, per doubling
SMALLEST, LARGEST = 6, 34  # logarithms of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingForecast:
    """One iteration under a sharding: its time, the slowest rank's steps, memory by rank.

    ``steps_us``: exposed time of each step of the rank whose tables take longest, in all
    ``iteration_us``. ``lookup_us``: lookups and updates of each rank's shards.
    """

    sharding: Sharding
    iteration_us: float
    steps_us: dict[str, float]
    lookup_us: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part that tables add to a step: time in us on its lane and on the host, and launches."""

    us: float
    host_us: float
    kernels: int


@dataclass(frozen=True, kw_only=True)
class _Skeleton:
    """A rank's priced step under some sharding, whose tables' parts are to be replaced.

    ``beside_us``: what runs beside the messages of a part.
    """

    model: PricedModel
    beside_us: Mapping[str, float]

    @property
    def lookups(self) -> int:
        """Lookups of shards."""
        return sum(c.module == "look up" for c in self.model.graph.capture.calls)

    @classmethod
    def of(cls, model: PricedModel, book: PriceBook) -> _Skeleton:
        """The priced step of a rank."""
        graph = model.graph
        ops = book.price(list(graph.wanted.values()))
        us = dict(zip(graph.wanted, (op.duration_us for op in ops), strict=True))
        sent = {c.module: i for i, c in enumerate(graph.capture.calls) if c.module in BESIDE}
        beside = {
            part: sum(us.get(at, 0.0) for at in until_read(i, graph.capture.calls))
            for part, i in sent.items()
        }
        return cls(model=model, beside_us=dict.fromkeys(BESIDE, 0.0) | beside)

    def cold(self, *parts: str) -> float:
        """The share of what these parts touch that no cache holds, mean of their calls."""
        graph = self.model.graph
        calls = enumerate(graph.capture.calls)
        found = [graph.wanted[i].cold for i, c in calls if c.module in parts and i in graph.wanted]
        return sum(found) / len(found) if found else 1.0

    @property
    def launches(self) -> Launches:
        """Host time of ops."""
        return self.model.layers[0].launches

    def with_parts(self, parts: Mapping[str, _Part]) -> PricedModel:
        """The step with other times of the parts that tables add to forward and backward."""
        layers = tuple(
            replace(
                x,
                forward=self._replaced(x.forward, x.layer.forward, parts),
                backward=self._replaced(x.backward, x.layer.backward, parts),
            )
            if self._parts_in(*x.layer.forward) or self._parts_in(*x.layer.backward)
            else x
            for x in self.model.layers
        )
        return replace(self.model, layers=layers, once=Once())

    def _parts_in(self, start: int, stop: int) -> list[str]:
        """The parts that calls belong to, in order."""
        modules = (c.module for c in self.model.graph.capture.calls[start:stop])
        return [part for part in modules if part in PHASES]

    def _replaced(
        self, ops: Sequence[PricedOp], span: tuple[int, int], parts: Mapping[str, _Part]
    ) -> tuple[PricedOp, ...]:
        """Ops of a layer with one op for each part; backward has one op of a part anyway."""
        found, python_us = list[PricedOp](), self.launches.python_us
        calls, seen = self.model.graph.capture.calls[slice(*span)], dict[str, int]()
        for op, call in zip(ops, calls, strict=True):
            part = call.module if call.module in PHASES else ""
            if part and part in seen:
                at = seen[part]
                found[at] = replace(found[at], launch_us=(found[at].launch_us or 0.0) + python_us)
                continue
            if part:
                seen[part], new = len(found), parts[part]
                op = replace(
                    op,
                    duration_us=new.us,
                    launch_us=new.host_us,
                    kernels=max(1, new.kernels),
                )
            found.append(op)
        return tuple(found)


class Forecaster:
    """Forecasts a model's iteration on a target with so many ranks under shardings of its tables.

    Every price is computed once.
    """

    def __init__(self, model: RankingModel, target: Target, world_size: int) -> None:
        gpu, plan = target.gpu, ParallelPlan(dp=world_size, node=target.plan.node)
        self.on_cpu = gpu.kind == "cpu"
        threads = max(1, gpu.sm_count // world_size) if self.on_cpu else 0
        self.model, self.world_size = model, world_size
        self.target = replace(target, plan=plan, threads=threads)
        self.book = price_book(target.bundle, gpu, threads, target.stack, target.host)
        self.where = cluster(plan, gpu, target.node)
        self.per_node = self.where.groups["dp"].per_node
        self.step = dlrm_step(model)
        self.tables = tables_of(self.step, model)
        self.skeletons: dict[frozenset[int], _Skeleton] = {}
        usual = self._skeleton(tuple(Placement("table_wise", (0,)) for _ in self.tables))
        self.times = ShardTimes(
            self.tables,
            model.optimizer,
            world_size,
            self.per_node,
            self.where.slowest_bytes_per_s("dp"),
            self.book,
            usual.cold("look up", "update tables"),
        )
        events = ({REPEATED: 1}, {"autograd_node": 1})
        self.repeated_us, self.node_us = (host_cost(e, self.book).duration_us for e in events)
        sizes = [_grid(2.0 ** (k / GRID)) for k in range(GRID * SMALLEST, GRID * LARGEST + 1)]
        cold = usual.cold("pack numbers", "pack vectors", "join vectors", "pack gradients")
        copies = self.book.price([priceable(_copy(n), cold) for n in sizes])
        self.copies = dict(zip(sizes, copies, strict=True))
        messages = [Message(kind="all_to_all", axis="dp", message_bytes=n) for n in sizes]
        sent = price_messages(messages, self.book, self.where)
        self.sent = dict(zip(sizes, sent, strict=True))

    def forecast(self, sharding: Sharding) -> ShardingForecast:
        """The iteration under a sharding; ValueError where it does not fit tables or ranks."""
        model, n = self.model, self.world_size
        check_sharding(sharding, model.tables, n, self.per_node)
        rank = self.times.slowest(sharding)
        held = held_shards(self.tables, sharding, self.per_node)
        work = table_work(held, rank, n, on_cpu=self.on_cpu)
        skeleton = self._skeleton(sharding)
        parts = {part: self._part(part, work, skeleton) for part in PHASES}
        priced = self._with_update(skeleton.with_parts(parts), work, parts["update tables"])
        simulated = rank_of(self.target.plan, priced, self.book, self.where)
        found = evaluate(simulated, self.step.optimizer)
        lookup_us, state = [0.0] * n, STATE_PER_WEIGHT[model.optimizer]
        for shard, time in self.times.held(sharding):
            lookup_us[shard.rank] += time.work_us
        memory = memory_bytes(sharding, model.tables, state, n, self.per_node)
        return ShardingForecast(
            sharding=sharding,
            iteration_us=found.iteration_us,
            steps_us=self._steps(found, parts, skeleton, simulated.ranks_per_core),
            lookup_us=tuple(lookup_us),
            memory_bytes=tuple(memory),
            fits=max(memory) <= self.book.gpu.hbm_bytes,
        )

    def _skeleton(self, sharding: Sharding) -> _Skeleton:
        """The step of a rank with the same copies and some of the other tables, as a whole."""
        n, kinds = self.world_size, [p.kind for p in sharding]
        copies = frozenset(i for i, kind in enumerate(kinds) if kind == "data_parallel")
        if copies not in self.skeletons:
            spread = [i for i in range(len(sharding)) if i not in copies]
            whole = {i: Placement("table_wise", (k % n,)) for k, i in enumerate(spread)}
            some = tuple(whole.get(i, place) for i, place in enumerate(sharding))
            self.skeletons[copies] = self._priced(some)
        return self.skeletons[copies]

    def _priced(self, sharding: Sharding) -> _Skeleton:
        step = rank_step(
            self.step,
            self.tables,
            sharding,
            0,
            self.world_size,
            self.per_node,
            on_cpu=self.on_cpu,
            optimizer=self.model.optimizer,
        )
        step = replace(step, host={**step.host, REPEATED: 0})
        model = price_model(step, self.target.plan, self.book, self.where)
        return _Skeleton.of(model, self.book)

    def _part(self, part: str, work: TableWork, skeleton: _Skeleton) -> _Part:
        """The time of a part: copies, lookups or updates of own shards, messages."""
        ops = [self.copies[_grid(n)] for n in work.copied.get(part, ()) if n]
        if part in ("look up", "update tables"):
            for time in self.times.of(list(dict.fromkeys(s for s, _ in work.own))):
                ops += time.forward if part == "look up" else time.backward
        if self.world_size > 1:
            ops += [self.sent[_grid(n)] for n in work.sent.get(part, ()) if n]
        us = sum(op.duration_us for op in ops)
        if part in BESIDE:
            beside_us = skeleton.beside_us[part]
            us = side_by_side_us(beside_us, us, default_contention(self.book.gpu)) - beside_us
        own_us = sum(skeleton.launches.us(op) - skeleton.launches.python_us for op in ops)
        own_us += self.repeated_us * work.small_ops.get(part, 0)
        if part == "look up":
            own_us += self.node_us * (len(work.own) - skeleton.lookups)
        return _Part(
            us=us,
            host_us=own_us,
            kernels=sum(map(skeleton.launches.kernels, ops)),
        )

    def _with_update(self, model: PricedModel, work: TableWork, part: _Part) -> PricedModel:
        """The step with the update of own shards before that of all else."""
        copies = [priceable(_copy(_grid(n))) for n in work.copied["update tables"] if n]
        shards = list(dict.fromkeys(s for s, _ in work.own))
        updates = [w for time in self.times.of(shards) for w in time.update]
        calls = (c for c in model.graph.capture.calls if c.phase == "optimizer")
        others = [
            w
            for w, c in zip(model.graph.optimizer, calls, strict=True)
            if c.module != "update tables"
        ]
        graph = replace(model.graph, optimizer=(*copies, *updates, *others))
        small_us = part.host_us if self.on_cpu else 0.0
        return replace(model, graph=graph, optimizer_host_us=model.optimizer_host_us + small_us)

    def _steps(
        self,
        found: Outcome,
        parts: Mapping[str, _Part],
        skeleton: _Skeleton,
        ranks_per_core: float,
    ) -> dict[str, float]:
        """Exposed time of each step of the simulated rank."""

        def lane_us(*names: str) -> float:
            host_us = sum(parts[name].host_us for name in names) if self.on_cpu else 0.0
            return ranks_per_core * (sum(parts[name].us for name in names) + host_us)

        sent = {name: parts[name].us for name in ("send numbers", *BESIDE)}
        spans = zip(found.tasks, found.spans, strict=True)
        optimizer_us = sum(s.end_us - s.start_us for t, s in spans if t.name == "optimizer")
        updates_us = lane_us("update tables")
        steps = dict.fromkeys(STEPS, 0.0) | {
            "distribute inputs": lane_us("pack numbers", "sort numbers") + sent["send numbers"],
            "look up": lane_us("look up", "pack vectors"),
            "exchange pooled vectors": sent["send vectors"],
            "exchange gradients": sent["send gradients"],
            "reduce gradients": found.exposed_comm_us - sum(sent.values()),
            "update tables": updates_us,
            "optimizer": optimizer_us - updates_us,
            "wait for the host": found.idle_us,
        }
        for part, name in BESIDE.items():
            steps[name] = ranks_per_core * skeleton.beside_us[part]
        steps["top perceptron, both ways"] = found.iteration_us - sum(steps.values())
        return steps


def _grid(nbytes: float) -> int:
    """The size of the grid that is nearest to so many bytes."""
    exponent = round(GRID * log2(max(nbytes, 1.0)))
    doublings: float = min(max(exponent, GRID * SMALLEST), GRID * LARGEST) / GRID
    return round(exp2(doublings))


def _copy(nbytes: int) -> OpCall:
    a, b = (TensorSpec(shape=(max(1, nbytes // 4),), dtype="fp32", storage=i) for i in (0, 1))
    return OpCall(op="aten.clone.default", args=(a,), outputs=(b,))
