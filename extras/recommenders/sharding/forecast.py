"""Forecasts one iteration of a DLRM under many shardings of its tables.

The step is captured with its tables, and rewritten for the slowest rank of each sharding as under a
plan with ``shard`` (``itercast.extras.recommenders.tables.rank_step``). Shardings that are asked
for together are priced together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import rank_of
from itercast.compose.parallel.device_memory import table_room_bytes
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.layer_prices import prefetch_steps
from itercast.compose.pricing.rank_graph import until_read
from itercast.compose.simulate.iteration import evaluate, quick_us
from itercast.compose.simulate.rank import Rank
from itercast.compose.target import Target
from itercast.extras.recommenders.sharded_model import RankingModel
from itercast.extras.recommenders.sharding.step import dlrm_step, tables_of
from itercast.extras.recommenders.tables.placement import Sharding, check_sharding, memory_bytes
from itercast.extras.recommenders.tables.rank_step import rank_step
from itercast.extras.recommenders.tables.shard_times import ShardTimes

# The step of an iteration that each part of ``table_work.PHASES`` belongs to.
STEP_OF_PART: Mapping[str, str] = {
    **dict.fromkeys(("pack numbers", "send numbers", "sort numbers"), "distribute inputs"),
    "fetch rows": "fetch rows",
    **dict.fromkeys(("look up", "pack vectors"), "look up"),
    "send vectors": "exchange pooled vectors",
    "send gradients": "exchange gradients",
}
BESIDE = {"send vectors": "bottom perceptron", "send gradients": "bottom perceptron, backward"}
OF_TABLES = ("look up", "update tables")
STEPS = (
    "distribute inputs",
    "fetch rows",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingForecast:
    """One iteration under a sharding: its time, lookups and updates by rank, memory by rank."""

    sharding: Sharding
    iteration_us: float
    lookup_us: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    fits: bool


class Forecaster:
    """Forecasts a model's iteration on a target with so many ranks under shardings of its tables.

    Equal ops and messages are priced once.
    """

    def __init__(self, model: RankingModel, target: Target, world_size: int) -> None:
        gpu, plan = target.gpu, ParallelPlan(dp=world_size, node=target.plan.node)
        threads = max(1, gpu.sm_count // world_size) if gpu.kind == "cpu" else 0
        self.model, self.world_size = model, world_size
        self.target = replace(target, plan=plan, threads=threads)
        self.book = self.target.book
        self.cluster = cluster_for(plan, gpu, target.node)
        self.room_bytes = table_room_bytes(gpu, world_size)
        self.per_node = self.cluster.groups["tables"].per_node
        self.step = dlrm_step(model)
        self.tables = tables_of(self.step, model)
        rate = self.cluster.slowest_bytes_per_s("tables")
        self.times = ShardTimes(
            self.tables, model.optimizer, world_size, self.per_node, rate, self.book
        )

    def forecast(self, sharding: Sharding) -> ShardingForecast:
        """The iteration under a sharding; ValueError where it does not fit tables or ranks."""
        return self.forecasts([sharding])[0]

    def forecasts(self, shardings: Sequence[Sharding]) -> list[ShardingForecast]:
        """The iterations under several shardings, priced together."""
        steps = [self._step(sharding) for sharding in shardings]
        prefetch_steps(((step, self.target.plan, self.cluster) for step in steps), self.book)
        pairs = zip(shardings, steps, strict=True)
        return [self._forecast(sharding, step) for sharding, step in pairs]

    def _step(self, sharding: Sharding) -> StepCapture:
        """The step of the rank whose tables take longest."""
        check_sharding(sharding, self.model.tables, self.world_size, self.per_node)
        return rank_step(
            self.step,
            self.tables,
            sharding,
            self.times.slowest(sharding),
            self.world_size,
            self.per_node,
            on_cpu=self.book.gpu.kind == "cpu",
            optimizer=self.model.optimizer,
        )

    def _rank(self, step: StepCapture) -> Rank:
        return rank_of(step, self.target.plan, self.book, self.cluster)

    def _forecast(self, sharding: Sharding, step: StepCapture) -> ShardingForecast:
        """Forecast of a sharding, from a step captured with its tables on their ranks."""
        lookup_us = self._lookup_us(sharding)
        tables, state = self.model.tables, self.model.state
        memory = memory_bytes(sharding, tables, state, self.world_size, self.per_node)
        rank = self._rank(step)
        return ShardingForecast(
            sharding=sharding,
            iteration_us=quick_us(rank, step.optimizer) - left_us(lookup_us, rank.ranks_per_core),
            lookup_us=tuple(lookup_us),
            memory_bytes=tuple(memory),
            fits=max(memory) <= self.room_bytes,
        )

    def _lookup_us(self, sharding: Sharding) -> list[float]:
        """Time of lookups and updates by rank."""
        spent = [0.0] * self.world_size
        for shard, time in self.times.held(sharding):
            spent[shard.rank] += time.work_us
        return spent

    def steps_us(self, sharding: Sharding) -> dict[str, float]:
        """Exposed time of each step of the slowest rank, in all its iteration."""
        rank = self._rank(self._step(sharding))
        outcome = evaluate(rank, self.step.optimizer)
        lane_us, calls = _lane_us(rank), rank.model.graph.capture.calls
        steps, sent_us = dict.fromkeys(STEPS, 0.0), 0.0
        for i, us in lane_us.items():
            part = calls[i].module
            if part in STEP_OF_PART:
                steps[STEP_OF_PART[part]] += us
                sent_us += us if part.startswith(("send", "fetch")) else 0.0
            if part in BESIDE:
                beside = until_read(i, calls)
                steps[BESIDE[part]] += sum(lane_us.get(at, 0.0) for at in beside)
        pairs = zip(outcome.tasks, outcome.spans, strict=True)
        optimizer_us = sum(span.duration_us for task, span in pairs if task.name == "optimizer")
        updates = self.book.price(list(rank.model.graph.tables))
        steps["update tables"] = rank.ranks_per_core * sum(op.duration_us for op in updates)
        steps["optimizer"] = optimizer_us - steps["update tables"]
        steps["reduce gradients"] = outcome.exposed_comm_us - sent_us
        steps["wait for the host"] = outcome.idle_us
        steps["top perceptron, both ways"] = outcome.iteration_us - sum(steps.values())
        left = left_us(self._lookup_us(sharding), rank.ranks_per_core)
        tables_us = sum(steps[name] for name in OF_TABLES)
        kept = 1 - left / tables_us if tables_us else 1.0  # 0: the slowest rank holds no table
        return {name: us * (kept if name in OF_TABLES else 1) for name, us in steps.items()}


def left_us(lookup_us: Sequence[float], ranks_per_core: float) -> float:
    """Time in us that the slowest rank gains because ranks with fewer lookups free their cores.

    Its forecast is as if all ranks shared the cores to its end. But they are busy only as long as
    the work of all takes, and a rank uses one core at most.
    """
    slowest, mean = max(lookup_us), sum(lookup_us) / len(lookup_us)
    return ranks_per_core * slowest - max(slowest, ranks_per_core * mean)


def _lane_us(rank: Rank) -> dict[int, float]:
    """Time of each call of forward and backward on the compute lane, by its number."""
    lane_us: dict[int, float] = {}
    for x in rank.model.layers:
        numbers = (*range(*x.layer.forward), *range(*x.layer.backward))
        for i, op in zip(numbers, (*x.forward, *x.backward), strict=True):
            work = x.fold([op])
            busy_us = rank.ranks_per_core * (work.lane_us - work.comm_us)
            lane_us[i] = work.comm_us + busy_us
    return lane_us
