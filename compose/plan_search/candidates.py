"""A plan search: what its plans share, and the plans that it tries.

Plans never tried:

- tensor parallelism beyond one link domain (a host, or a rack of GPUs joined by NVLink);
- plans whose parameters, gradients and optimizer state alone exceed the memory, spread evenly;
- micro-batches of more than ``LARGEST_MICRO_BATCH`` samples, or a script's own if it is larger;
  but a model whose embedding tables are larger than all else takes the whole batch at once;
- embedding tables spread over ranks (``shard``) in other models;
- context parallelism of sequences shorter than ``LONG_SEQUENCE``;
- recomputation where the plan fits without, parameters in host memory where it fits with that;
- ZeRO stage 2, more than two stages per rank;
- local SGD, unless the search is asked for a number of steps between averages;
- HSDP (sharding within a node) of experts that are spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan, micro_batch
from itercast.capture.plan_keys import GREEDY
from itercast.compose.forecast import Forecast, forecast, rank_of
from itercast.compose.graph.layers import split_layers
from itercast.compose.graph.product_roles import alias_weight_casts
from itercast.compose.parallel.captured_tables import captured_tables
from itercast.compose.parallel.device_memory import lacking_on_host, room_bytes, too_close
from itercast.compose.parallel.ep import expert_weights
from itercast.compose.parallel.placement import Cluster, Group, cluster_for, gpus_per_domain
from itercast.compose.plan_search.sizes import CaptureAt, CapturesBySize, Size
from itercast.compose.pricing.collectives import Message, prefetch_messages
from itercast.compose.pricing.layer_prices import AskedStep, prefetch_steps
from itercast.compose.pricing.optimizer import state_copies
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.compose.simulate.fsdp import units_of_stages
from itercast.compose.simulate.iteration import quick_us
from itercast.compose.simulate.memory.stage_memory import host_memory, memory
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import chunks_of
from itercast.microbench.hardware.node import Node

OBJECTIVES = ("time", "cost", "memory")
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb", 1))  # with stages per rank
MISFIT_PENALTY = 1e18  # added to the score of plans that exceed the memory: they come last
LARGEST_MICRO_BATCH: int = assumed(__file__, "largest_micro_batch")
LONG_SEQUENCE: int = assumed(__file__, "long_sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan (by one of its ranks) with its memory and its time, or a lower bound of the time.

    ``close``: too close to the GPU's memory to tell whether it fits (within the memory model's
    error).
    """

    rank: Rank
    iteration_us: float
    memory_bytes: int
    fits: bool
    close: bool = False

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.rank.plan

    def score(self, objective: str) -> float:
        """The number to minimise; plans that exceed the memory come after all others."""
        score = {
            "time": self.iteration_us,
            "cost": self.iteration_us * self.plan.world_size,
            "memory": float(self.memory_bytes),
        }[objective]
        return score if self.fits else score + MISFIT_PENALTY


@dataclass
class Search:
    """Evaluates plans of one model on one kind of GPU; captures and prices are shared by plans.

    ``capture_at(batch, seq, autocast)`` captures one micro-batch; ``batch`` counts the samples of a
    step over all replicas.
    """

    capture_at: CaptureAt
    book: PriceBook
    node: Node | None
    batch: int
    seq: int
    optimizer: str
    dtype: str = "fp32"
    amp: bool = False
    largest: int = LARGEST_MICRO_BATCH  # samples of a micro-batch
    local: int = 0  # also try replicas that average their parameters every ``local`` steps
    refused: dict[str, str] = field(default_factory=dict)  # plan -> the rule it breaks
    too_large: list[float] = field(default_factory=list)  # least bytes of plans left out by them
    tell: Callable[[str], None] = lambda told: None  # is told what the search does before it lists

    @cached_property
    def captures(self) -> CapturesBySize:
        """The captured steps of micro-batches, by size."""
        return CapturesBySize(self.capture_at)

    def size(self, plan: ParallelPlan) -> Size:
        """The micro-batch of a plan: samples, tokens of a sample on one rank, autocast or not."""
        if self.batch % plan.dp:
            raise ValueError(f"plan {str(plan)!r}: dp does not divide {self.batch} samples")
        return (*micro_batch(plan, self.batch // plan.dp, self.seq), plan.autocast)

    def announce(self, plans: Iterable[ParallelPlan]) -> None:
        """Name plans that may be asked for: few steps are captured."""
        self.captures.announce(self._sizes(plans).values())

    def price(self, plans: Iterable[ParallelPlan]) -> None:
        """Price ops and messages of plans, one of each shape, in one call for each family."""
        prefetch_steps(self._steps(self._sizes(plans)), self.book)

    def _sizes(self, plans: Iterable[ParallelPlan]) -> dict[ParallelPlan, Size]:
        """The micro-batch of each plan that no rule about batches forbids."""
        sizes = dict[ParallelPlan, Size]()
        for plan in plans:
            with suppress(ValueError):  # a rule forbids the plan: ``allowed`` says so
                sizes[plan] = self.size(plan)
        return sizes

    def _steps(self, sizes: Mapping[ParallelPlan, Size]) -> Iterator[AskedStep]:
        """The captured step of each plan, the plan, and where its ranks lie."""
        for n, (plan, size) in enumerate(sizes.items()):
            self.tell(f"capturing the model, size {n + 1} of {len(sizes)}")
            with suppress(ValueError):  # it cannot be captured: ``legal`` says so
                if not plan.shard:
                    yield self.captures.at(size), plan, cluster_for(plan, self.book.gpu, self.node)

    def rank(self, plan: ParallelPlan) -> Rank:
        """A rank of the plan; plans with the same tp, cp and ep share its priced layers."""
        cluster = cluster_for(plan, self.book.gpu, self.node)
        return rank_of(self.captures.at(self.size(plan)), plan, self.book, cluster)

    def allowed(self, plan: ParallelPlan) -> Rank | None:
        """A rank of the plan; None where a rule forbids the plan (``refused`` says which)."""
        try:
            rank = self.rank(plan)
            chunks_of(rank)
        except ValueError as exc:
            self.refused[str(plan)] = str(exc)
            return None
        return rank

    def legal(self, plans: Sequence[ParallelPlan]) -> list[Rank]:
        """A rank of each plan that no rule forbids; the plans must have one ``Shape``.

        Such plans run the same ops: if the first one cannot be rewritten, none can.
        """
        first, book = plans[0], self.book
        try:
            if not first.shard:
                step = self.captures.at(self.size(first))
                rank_graph(step, first, book.gpu, book.stack, book.whole_cells)
        except ValueError as exc:
            self.refused[str(first)] = str(exc)
            return []
        return list(filter(None, map(self.allowed, plans)))

    def price_sharded(self, ranks: Iterable[Rank]) -> None:
        """Price all messages that FSDP sends under these plans in one call of the pricer."""
        clusters, done = dict[tuple[Message, Group], Cluster](), set[tuple[int, ...]]()
        for rank in (rank for rank in ranks if rank.plan.zero):
            plan, cluster = rank.plan, rank.cluster
            if (key := (id(rank.model), plan.zero, plan.stage_ranks, plan.shards)) not in done:
                done.add(key)
                messages = (m for unit in units_of_stages(rank) for m in unit.messages)
                clusters |= {(m, cluster.groups[m.axis]): cluster for m in messages}
        if clusters:  # all are of one GPU and node
            prefetch_messages(list(clusters), self.book, next(iter(clusters.values())))

    def why_none(self) -> str:
        """Why no plan is legal: the rule that plans break, or that parameters exceed the memory."""
        if self.refused or not self.too_large:
            return next(iter(self.refused.values()), "no degrees multiply to that many GPUs")
        gpu, least = self.book.gpu, min(self.too_large)
        return (
            f"parameters, gradients and optimizer take at least {least / 1e9:.1f} GB a GPU, "
            f"a {gpu.name} has {gpu.hbm_bytes / 1e9:.1f}"
        )

    def step_of_few(self) -> StepCapture:
        """The step of one sample, or of two where one is too few, as for norms over a batch."""
        try:
            return self.captures.at((1, self.seq, self.amp))
        except ValueError:
            return self.captures.at((2, self.seq, self.amp))

    def left_out(self) -> str:
        """Says in which micro-batches the model cannot be captured, and why; "" if in all."""
        sizes = sorted({(samples, tokens) for samples, tokens, _ in self.captures.failed})
        listed = ", ".join(f"{n} x {tokens:,}" if tokens else f"{n}" for n, tokens in sizes)
        why = next(iter(self.captures.failed.values()), "")
        unit = "tokens" if self.seq else "samples"
        return f"no plans with micro-batches of {listed} {unit} a rank: {why}" if why else ""

    def scored(self, rank: Rank, iteration_us: float) -> Scored:
        """Scores a plan: its time as given, its memory, and whether it fits."""
        nbytes = sum(memory(rank, self.optimizer).values())
        room = room_bytes(self.book.gpu, rank.plan)
        on_host = lacking_on_host(rank.cluster, host_memory(rank, self.optimizer))
        fits = {"fits": nbytes <= room and not on_host, "close": too_close(nbytes, room)}
        return Scored(rank=rank, iteration_us=iteration_us, memory_bytes=nbytes, **fits)

    def simulated(self, rank: Rank) -> Scored:
        """The rank with its plan's simulated iteration time, and its memory."""
        return self.scored(rank, quick_us(rank, self.optimizer))

    def report(self, plan: ParallelPlan, bundle_name: str) -> Forecast:
        """The whole forecast of a plan."""
        step = self.captures.at(self.size(plan))
        return forecast(step, plan, self.book, self.node, bundle_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Bytes of a model's parameters, of those with a gradient, and of the largest layer's."""

    parameters: int
    trained: int
    largest_layer: int


def candidate_plans(search: Search, world: int) -> Iterator[ParallelPlan]:
    """Yields the plans to try on ``world`` GPUs; rules about layers are checked later."""
    domain = gpus_per_domain(search.book.gpu, search.node)
    first = search.step_of_few()
    folded = split_layers(first)
    model_bytes = ModelBytes(
        parameters=sum(x.parameter_bytes * x.count for x in folded),
        trained=sum(x.trained_bytes * x.count for x in folded),
        largest_layer=max(x.parameter_bytes for x in folded),
    )
    layers = sum(x.count for x in folded)
    long = search.seq >= LONG_SEQUENCE
    tables = _mostly_tables(first)
    experts = {p.shape[0] for p in expert_weights(alias_weight_casts(first)).values()}
    for tp in _divisors(world):
        if tp > domain:
            continue
        for pp in _divisors(world // tp):
            if pp > layers:
                continue
            for cp in _divisors(world // tp // pp) if long else [1]:
                dp = world // tp // pp // cp
                if search.batch % dp:
                    continue
                for ep in _divisors(dp) if experts else [1]:
                    if not any(n % ep for n in experts):
                        degrees = ParallelPlan(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, amp=search.amp)
                        yield from _variants(search, degrees, model_bytes, tables)
    if tables and world > 1:
        yield from _beside_spread_tables(search, world, domain)


def _beside_spread_tables(search: Search, world: int, domain: int) -> Iterator[ParallelPlan]:
    """Plans with embedding tables spread over all GPUs, and all ways to cut or shard the rest."""
    node = search.node.name if search.node else ""
    for tp in _divisors(world):
        if tp <= domain and search.batch % (world // tp) == 0:
            spread = ParallelPlan(dp=world // tp, tp=tp, shard=GREEDY, amp=search.amp, node=node)
            for zero, hsdp in _sharding(search, spread):
                yield replace(spread, zero=zero, hsdp=hsdp)


def _mostly_tables(capture: StepCapture) -> bool:
    """Whether embedding tables have more bytes than all other parameters."""
    tables = sum(t.parameter.nbytes for t in captured_tables(capture))
    return 2 * tables > sum(p.nbytes for p in capture.parameters)


def _divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _variants(
    search: Search, degrees: ParallelPlan, model_bytes: ModelBytes, tables: bool
) -> Iterator[ParallelPlan]:
    """Yields plans of these degrees with every ZeRO stage, sp, schedule and micro-batch.

    Shards that are too large for a GPU lie in host memory. ``tables``: the model is mostly
    embedding tables.
    """
    samples, pp = search.batch // degrees.dp, degrees.pp  # of a replica
    small = [size for size in _divisors(samples) if size <= search.largest]
    sizes = [samples] if tables else small
    for zero, hsdp in _sharding(search, degrees):
        sharded = replace(degrees, zero=zero, hsdp=hsdp)
        room = room_bytes(search.book.gpu, sharded)
        if (least := _least_bytes(search, sharded, model_bytes)) > room:
            search.too_large.append(least)
            moved = in_host_memory(search, sharded)
            if moved is None or model_bytes.largest_layer / (moved.tp * moved.ep) > room:
                continue
            sharded = moved
        for sp in (False, True) if degrees.tp > 1 else (False,):
            for schedule, virtual in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                for size in sizes:
                    micro = samples // size
                    if schedule == "interleaved" and micro % pp:
                        continue
                    yield replace(
                        sharded,
                        sp=sp,
                        schedule=schedule,
                        virtual=virtual,
                        micro=micro if pp > 1 else 0,
                        accumulate=micro if pp == 1 else 1,
                        node=search.node.name if search.node else "",
                    )


def _sharding(search: Search, degrees: ParallelPlan) -> list[tuple[int, int]]:
    """Pairs (ZeRO stage, ``hsdp``: ranks of a node that shard, 0 for all) to try."""
    replicas = degrees.dp * degrees.cp
    if replicas == 1:
        return [(0, 0)]
    in_node = gpus_per_domain(search.book.gpu, search.node) // degrees.tp
    hsdp = 1 < in_node < replicas and replicas % in_node == 0 and degrees.ep == 1
    return [(0, 0), (1, 0), (3, 0), *([(1, in_node), (3, in_node)] if hsdp else [])]


def in_host_memory(search: Search, plan: ParallelPlan) -> ParallelPlan | None:
    """The plan with its shards in host memory; None if a rule forbids it or they are there."""
    if plan.zero < 3 or plan.offload or search.book.gpu.kind == "cpu" or plan.ep > 1 or plan.local:
        return None
    return replace(plan, offload="parameters")


def _least_bytes(search: Search, plan: ParallelPlan, model_bytes: ModelBytes) -> float:
    """Lower bound of a rank's parameters, gradients and optimizer state in bytes.

    As if layers were spread evenly and ep cut all parameters.
    """
    parts, shards = plan.tp * plan.pp * plan.ep, plan.shards / plan.ep
    copies = state_copies(search.optimizer) - (search.optimizer == "muon")  # most of it has fewer
    state = copies * model_bytes.trained / parts
    weights_and_gradients = (model_bytes.parameters + model_bytes.trained) / parts
    if plan.zero == 3:
        return (weights_and_gradients + state) / shards
    return weights_and_gradients + (state / shards if plan.zero else state)
