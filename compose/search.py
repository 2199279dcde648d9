"""Legal plans for a number of GPUs, pruned, and the best of them by an objective.

Left out unseen: tensor parallelism across nodes, plans whose parameters, gradients and optimizer
state alone exceed the memory (a lower bound: layers are never spread more evenly than that), larger
micro-batches than the smallest that does not fit, and recomputation where all fits without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from compose.forecast import Forecast, rank_of, report
from compose.graph.layers import split_layers
from compose.graph.product_roles import casts_as_weights
from compose.parallel.ep import expert_weights
from compose.parallel.plan import ParallelPlan, micro_batch
from compose.pricing.collectives import cluster
from compose.pricing.layer_prices import price_model
from compose.pricing.optimizer import STATE_COPIES
from compose.pricing.price_book import PriceBook
from compose.simulate.iteration import evaluate, quick_us
from compose.simulate.rank import Rank
from compose.simulate.stage_rank import chunks_of, least_us, memory
from microbench.hardware.node import Node
from microbench.opcall import StepCapture

OBJECTIVES = ("time", "cost", "memory")
MISFIT = 1e18  # added to the score of a plan that does not fit: all that fit come first
LARGEST_MICRO_BATCH = 8
LONG = 8192  # tokens from which context parallelism is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan with its time and memory."""

    plan: ParallelPlan
    iteration_us: float
    memory_bytes: int
    fits: bool

    def score(self, objective: str) -> float:
        """Smaller is better; a plan that does not fit comes after all that do."""
        values = {
            "time": self.iteration_us,
            "cost": self.iteration_us * self.plan.world_size,
            "memory": float(self.memory_bytes),
        }
        return values[objective] + (0.0 if self.fits else MISFIT)


@dataclass
class Search:
    """Evaluates plans of one model on one kind of GPU; what plans share is done once.

    ``capture_at(batch, seq)`` captures one micro-batch; ``batch`` is samples per step over all.
    """

    capture_at: Callable[[int, int], StepCapture]
    book: PriceBook
    node: Node | None
    batch: int
    seq: int
    optimizer: str
    amp: bool = False
    captures: dict[tuple[int, int], StepCapture] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # plan to rule

    def capture(self, plan: ParallelPlan) -> StepCapture:
        """One micro-batch of a replica."""
        if self.batch % plan.dp:
            raise ValueError(f"plan {str(plan)!r}: dp does not divide {self.batch} samples")
        key = micro_batch(plan, self.batch // plan.dp, self.seq)
        if key not in self.captures:
            self.captures[key] = self.capture_at(*key)
        return self.captures[key]

    def rank(self, plan: ParallelPlan) -> Rank:
        """A rank of the plan, from layers priced once per cut and placement of tp, cp and ep."""
        capture, where = self.capture(plan), cluster(plan, self.book.gpu, self.node)
        return rank_of(plan, price_model(capture, plan, self.book, where), self.book, where)

    def allowed(self, plan: ParallelPlan) -> Rank | None:
        """A rank of the plan; None where a rule forbids it (``refused`` says which)."""
        try:
            rank = self.rank(plan)
            chunks_of(rank)
        except ValueError as exc:
            self.refused[str(plan)] = str(exc)
            return None
        return rank

    def scored(self, rank: Rank, iteration_us: float) -> Scored:
        """A plan with its memory and a time."""
        nbytes = sum(memory(rank, self.optimizer).values())
        fits = nbytes <= self.book.gpu.hbm_bytes
        return Scored(plan=rank.plan, iteration_us=iteration_us, memory_bytes=nbytes, fits=fits)

    def simulated(self, rank: Rank) -> Scored:
        """A plan with its memory and its iteration."""
        return self.scored(rank, quick_us(rank, self.optimizer))

    def report(self, plan: ParallelPlan, bundle_name: str) -> Forecast:
        """The plan's whole forecast."""
        rank = self.rank(plan)
        found = evaluate(rank, self.optimizer)
        return report(found, self.capture(plan), plan, rank.model, self.book, bundle_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plans; ``considered`` were bounded, ``simulated`` of them simulated."""

    best: list[Scored]
    considered: int
    simulated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A plan that no rule forbids, and the least it can score."""

    least: float
    rank: Rank

    @property
    def plan(self) -> ParallelPlan:
        """The plan itself."""
        return self.rank.plan


def bounded_plans(
    search: Search, gpus: int, objective: str, on_plan: Callable[[int], None] = lambda n: None
) -> list[Bounded]:
    """All legal plans on ``gpus`` GPUs (or fewer, where cost counts), by the least they can score.

    Deterministic, so that workers on many machines agree on the order.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r}: allowed are {', '.join(OBJECTIVES)}")
    if gpus < 1:
        raise ValueError(f"gpus is a positive number, got {gpus}")
    worlds = [gpus]
    while objective == "cost" and worlds[-1] % 2 == 0:
        worlds.append(worlds[-1] // 2)
    found: list[Bounded] = []
    for world in worlds:
        for plan in _candidates(search, world):
            on_plan(len(found))
            found += _bounded(search, plan, objective)
    return sorted(found, key=lambda b: b.least)


def _bounded(search: Search, plan: ParallelPlan, objective: str) -> Iterator[Bounded]:
    """A legal plan with its bound; where it does not fit, recomputed as well."""
    rank = search.allowed(plan)
    if rank is None:
        return
    scored = search.scored(rank, least_us(rank))
    yield Bounded(least=scored.score(objective), rank=rank)
    if not scored.fits and not plan.recompute:
        yield from _bounded(search, replace(plan, recompute="full"), objective)


def best_plans(
    search: Search,
    gpus: int,
    objective: str,
    count: int = 10,
    on_plan: Callable[[int], None] = lambda n: None,
) -> Found:
    """The best plans: a branch-and-bound search.

    Plans are taken by the least that they can score; once that is more than what the last of the
    best scores, no other plan can be among them.
    """
    waiting = bounded_plans(search, gpus, objective, on_plan)
    best: list[Scored] = []
    simulated = 0
    for bounded in waiting:
        if len(best) == count and bounded.least >= best[-1].score(objective):
            break
        simulated += 1
        best.append(search.simulated(bounded.rank))
        best = sorted(best, key=lambda s: s.score(objective))[:count]
    return Found(best=best, considered=len(waiting), simulated=simulated)


def _candidates(search: Search, world: int) -> Iterator[ParallelPlan]:
    """Legal degrees for a number of GPUs, but for what needs the layers to see."""
    per_node = search.node.gpus_per_node if search.node else 8
    first = search.capture_at(1, search.seq)
    parts = split_layers(first)
    size = sum(x.parameter_bytes * x.count for x in parts)
    layers = sum(x.count for x in parts)
    long = search.seq >= LONG
    experts = {p.shape[0] for p in expert_weights(casts_as_weights(first)).values()}
    for tp in _divisors(world):
        if tp > per_node:
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
                        yield from _variants(search, degrees, size)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _variants(search: Search, degrees: ParallelPlan, size: int) -> Iterator[ParallelPlan]:
    """Plans of these degrees: what is sharded and cut, schedules, micro-batches."""
    replica, pp = search.batch // degrees.dp, degrees.pp
    sizes = [b for b in _divisors(replica) if b <= LARGEST_MICRO_BATCH]
    for zero in (0, 1, 3) if degrees.dp * degrees.cp > 1 else (0,):
        if _least_bytes(search, zero, degrees, size) > search.book.gpu.hbm_bytes:
            continue
        for sp in (False, True) if degrees.tp > 1 else (False,):
            for schedule, virtual in _schedules(pp):
                for b in sizes:
                    micro = replica // b
                    if schedule == "interleaved" and micro % pp:
                        continue
                    yield replace(
                        degrees,
                        zero=zero,
                        sp=sp,
                        schedule=schedule,
                        virtual=virtual,
                        micro=micro if pp > 1 else 0,
                        accumulate=micro if pp == 1 else 1,
                        node=search.node.name if search.node else "",
                    )


def _schedules(pp: int) -> list[tuple[str, int]]:
    return [("1f1b", 1), ("interleaved", 2), ("zb", 1)] if pp > 1 else [("1f1b", 1)]


def _least_bytes(search: Search, zero: int, degrees: ParallelPlan, size: int) -> float:
    """Parameters, gradients and optimizer state if they were spread evenly, all in experts."""
    own = size / (degrees.tp * degrees.pp * degrees.ep)
    state, replicas = STATE_COPIES[search.optimizer] * own, degrees.dp * degrees.cp / degrees.ep
    if zero == 3:
        return (2 * own + state) / replicas
    return 2 * own + (state / replicas if zero else state)
