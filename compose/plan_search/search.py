"""Searches the best parallel plans for a number of GPUs, by branch and bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count as count_up
from math import exp, inf
from typing import NamedTuple

from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.plan_search.bounds import least_us, mean_us
from itercast.compose.plan_search.candidates import (
    OBJECTIVES,
    Scored,
    Search,
    candidate_plans,
    in_host_memory,
)
from itercast.compose.plan_search.shapes import Shapes
from itercast.compose.plan_search.simplest import PLANS_APART, keys, simplest
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import uneven


class Waiting(NamedTuple):
    """A plan in the heap: lower bound of its score, its number, and the next function to call."""

    bound: float
    number: int  # of equal bounds the first goes first
    next_step: Callable[[Rank], None]
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plans; ``considered`` counts legal plans that were looked at, ``simulated`` those
    of them that were simulated.

    ``stopped``: the search was interrupted before it had seen all plans. ``simplest``: the one with
    the fewest keys that may be as good as the best (``simplest``), if any was found. ``tried``: all
    that were simulated.
    """

    best: list[Scored]
    considered: int
    simulated: int
    stopped: bool = False
    simplest: Scored | None = None
    tried: Sequence[Scored] = ()


def shapes_of(search: Search, gpus: int, objective: str) -> Shapes:
    """The plans to try on ``gpus``, by shape.

    For objective "cost" also those on a half, a quarter... of the GPUs.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r}: allowed are {', '.join(OBJECTIVES)}")
    if gpus < 1:
        raise ValueError(f"gpus is a positive number, got {gpus}")
    worlds = [gpus]
    while objective == "cost" and worlds[-1] % 2 == 0:
        worlds.append(worlds[-1] // 2)
    plans = [plan for world in worlds for plan in candidate_plans(search, world)]
    search.announce(plans)
    return Shapes(search, plans, {"time": 1 / gpus, "cost": 1.0, "memory": 0.0}[objective])


class BranchAndBound:
    """The legal plans of a search: a queue of those to look at closer, and the best so far.

    Plans queue in order of a lower bound of their score. The bound is refined in steps: mean
    compute of the ranks, what the schedule does in sequence, memory; at last the plan is simulated.
    """

    def __init__(
        self,
        search: Search,
        objective: str = "time",
        count: int = 10,
        on_plan: Callable[[int, ParallelPlan], None] = lambda n, best: None,
    ) -> None:
        self.search, self.objective, self.count, self.on_plan = search, objective, count, on_plan
        self.listed: dict[ParallelPlan, Rank] = {}
        self.weighed: list[Scored] = []  # with bounds of their times
        self.waiting: list[Waiting] = []  # a heap
        self.numbers = count_up()
        self.best: list[Scored] = []
        self.tried: list[Scored] = []

    @property
    def limit(self) -> float:
        """The score that one of the best has to be below."""
        return self._score(self.best[-1]) if len(self.best) == self.count else inf

    @property
    def reach(self) -> float:
        """The score up to which plans are looked at: one may be the simplest (``simplest``)."""
        return max(self.limit, self._score(self.best[0]) * exp(PLANS_APART)) if self.best else inf

    @property
    def lowest_bound(self) -> float:
        """The lowest bound of those that wait."""
        return self.waiting[0].bound if self.waiting else inf

    def may_be_best(self, rank: Rank, time_us: float) -> bool:
        """Whether a plan that takes so long may be one of the best, whatever its memory."""
        return self._least(rank, time_us) < self.limit

    def add(self, plans: Iterable[Rank]) -> None:
        """Queue the plans that were never queued, and tell how many there are."""
        for rank in plans:
            if rank.plan not in self.listed:
                self.listed[rank.plan] = rank
                self._wait(self._least(rank, mean_us(rank)), self._bound, rank)
                leader = self.best[0] if self.best else self.waiting[0].rank
                self.on_plan(len(self.listed), leader.plan)

    def simulate(self, below: float = inf) -> None:
        """Simulate plans in order of their bounds, up to a score or the worst of the best."""
        while self.lowest_bound < min(below, self.limit):
            waiting = heappop(self.waiting)
            waiting.next_step(waiting.rank)

    def near(self, shapes: Shapes, wanted: Callable[[ParallelPlan], bool]) -> list[Scored]:
        """The ``wanted`` plans with memory, but unsimulated, whose bound is within ``reach``."""
        shapes, others = shapes.only(wanted), list[Waiting]()
        while shapes.least < self.reach:
            self.add(shapes.take(shapes.least))
        while self.lowest_bound < self.reach:
            waiting = heappop(self.waiting)
            if waiting.next_step != self._simulate and wanted(waiting.rank.plan):
                waiting.next_step(waiting.rank)
            else:
                others.append(waiting)
        self.waiting = [*others, *self.waiting]
        heapify(self.waiting)
        return [scored for scored in self.weighed if wanted(scored.plan)]

    def _score(self, plan: Scored) -> float:
        return plan.score(self.objective)

    def _least(self, rank: Rank, time_us: float) -> float:
        """The score of a plan that takes so long, if it fits."""
        return self._score(Scored(rank=rank, iteration_us=time_us, memory_bytes=0, fits=True))

    def _wait(self, bound: float, next_step: Callable[[Rank], None], rank: Rank) -> None:
        """Queue a plan by a bound of its score; ``next_step`` is called when its turn comes."""
        heappush(self.waiting, Waiting(bound, next(self.numbers), next_step, rank))

    def _bound(self, rank: Rank) -> None:
        """Bound a plan by its schedule; queue it with uneven stages if these balance better."""
        self._wait(self._least(rank, least_us(rank)), self._weigh, rank)
        plan = rank.plan
        if plan.first == plan.last == 0 and plan.recompute != "budget":
            self.add(_legal(self.search, uneven(rank.model.layers, plan)))

    def _weigh(self, rank: Rank) -> None:
        """Compute a plan's memory, to queue it for simulation.

        If it exceeds the GPU's, queue the plan with recomputation too, then with shards in host
        memory.
        """
        scored = self.search.scored(rank, least_us(rank))
        self.weighed.append(scored)
        self._wait(self._score(scored), self._simulate, rank)
        plan = rank.plan
        if not scored.fits and not plan.recompute:
            self.add(_legal(self.search, replace(plan, recompute="full")))
        elif not scored.fits and plan.recompute == "full":
            self.add(_legal(self.search, in_host_memory(self.search, plan)))

    def _simulate(self, rank: Rank) -> None:
        """Simulate a plan; keep it if it is among the best."""
        simulated = self.search.simulated(rank)
        self.tried.append(simulated)
        self.best = sorted([*self.best, simulated], key=self._score)[: self.count]
        self.on_plan(len(self.listed), self.best[0].plan)


def _legal(search: Search, plan: ParallelPlan | None) -> list[Rank]:
    """The rank of a plan, in a list; empty for None, or where a rule forbids the plan."""
    rank = search.allowed(plan) if plan else None
    return [rank] if rank else []


def v_shaped(tree: BranchAndBound) -> Iterator[Rank]:
    """Yields listed plans with V-shaped schedules instead of 1F1B, if they may be among the best.

    Their bound is a rank's mean share of all compute, as they may leave no bubble.
    """
    for plan, rank in list(tree.listed.items()):
        plain = plan.schedule == "1f1b" and not plan.recompute and plan.first == plan.last == 0
        if plan.pp > 1 and plain and tree.may_be_best(rank, mean_us(rank)):
            for schedule in V_SHAPED:
                with suppress(ValueError):  # a rule forbids it
                    shaped = replace(plan, schedule=schedule, virtual=2)
                    yield from _legal(tree.search, shaped)


def local_or_recomputed(tree: BranchAndBound) -> Iterator[Rank]:
    """Yields variants of plans with local SGD, or with as little recomputation as fits.

    They cannot beat the bound of the plan itself, so only plans that may be best have variants.
    """
    for scored in list(tree.weighed):
        if tree.may_be_best(scored.rank, scored.iteration_us):
            if tree.search.local:
                with suppress(ValueError):
                    local = replace(scored.plan, local=tree.search.local)
                    yield from _legal(tree.search, local)
            yield from _recomputed(tree.search, scored)


def _recomputed(search: Search, scored: Scored) -> list[Rank]:
    """The plan, if it may exceed the memory, with as little recomputation as fits.

    Tries budgets (the share of activations to save) in tenths, from the most that may fit
    downwards; returns the first that surely fits, else the first that may.
    """
    plan, activations = scored.plan, memory(scored.rank, search.optimizer)["activations"]
    excess = max(0, scored.memory_bytes - room_bytes(search.book.gpu, plan))
    surely_fits = scored.fits and not scored.close
    if plan.recompute or surely_fits or excess >= activations:
        return []
    may_fit = list[Rank]()
    for tenth in range(int(10 * (1 - excess / activations)), 0, -1):
        for rank in _legal(search, replace(plan, recompute="budget", recomputed=tenth / 10)):
            budget = search.scored(rank, 0.0)
            if budget.fits and not budget.close:
                return [rank]
            may_fit += [rank] if budget.fits else []
    return may_fit[: 1 if excess else 0]


@without_garbage_collection()
def best_plans(
    search: Search,
    gpus: int,
    objective: str,
    count: int = 10,
    on_plan: Callable[[int, ParallelPlan], None] = lambda n, best: None,
) -> SearchResult:
    """Returns the ``count`` best plans by an objective (``OBJECTIVES``), found by branch and bound.

    Plans are listed by shape, weighed and simulated in the order of their bounds, until the next
    bound is worse than the worst of the best. Then come variants of plans that may still be best:
    V-shaped pipelines, local SGD (fewer averages) and as little recomputation as fits. ``on_plan``
    is told how many plans were considered, and the best so far. The result also has the simplest
    plan, with the fewest keys, that is about as good as the best one (``simplest``).
    KeyboardInterrupt ends the listing; a second one, the simulation.
    """
    tree, stopped = BranchAndBound(search, objective, count, on_plan), False
    try:
        shapes = shapes_of(search, gpus, objective)
        while shapes.least < tree.limit:
            tree.add(shapes.take(max(shapes.least, min(tree.lowest_bound, tree.limit))))
            tree.simulate(below=shapes.least)
        tree.simulate()
        tree.add(v_shaped(tree))
        tree.simulate()
        tree.add(local_or_recomputed(tree))
    except KeyboardInterrupt:
        stopped = True
    try:
        tree.simulate()
    except KeyboardInterrupt:
        stopped = True
    plainest, more = None, list[Scored]()
    if tree.best and not stopped:

        def near(count: int) -> list[Scored]:
            return tree.near(shapes, lambda plan: keys(plan) == count)

        plainest, more = simplest(search, tree.best[0], near, objective)
    tried = [*tree.tried, *more]
    return SearchResult(
        best=tree.best,
        considered=len(tree.listed),
        simulated=len(tried),
        stopped=stopped,
        simplest=plainest,
        tried=tried,
    )
