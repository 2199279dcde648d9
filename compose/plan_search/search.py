"""Searches the best parallel plans for a number of GPUs, by branch and bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import exp, inf

from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.parallel.device_memory import room_bytes, too_close
from itercast.compose.plan_search.candidates import OBJECTIVES, Scored, Search, candidate_plans
from itercast.compose.plan_search.shapes import Shapes, mean_us
from itercast.compose.plan_search.simplest import PLANS_APART, simplest
from itercast.compose.simulate.memory_plan import memory
from itercast.compose.simulate.pipeline import CUT_BACKWARD
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.stages import chunks_of, dealt, uneven


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


def legal_plans(search: Search, gpus: int, objective: str) -> Iterator[Scored]:
    """Yields legal plans without their ``variants``, with lower bounds of their times."""
    shapes = shapes_of(search, gpus, objective)
    while shapes.waiting:
        yield from _listed(search, shapes.take(inf), objective)


def _listed(search: Search, plans: Iterable[ParallelPlan], objective: str) -> Iterator[Scored]:
    for plan in plans:
        yield from _bounded(search, plan, objective)


def least_us(rank: Rank) -> float:
    """A lower bound of the iteration: compute that any schedule must do one after the other.

    The first micro-batch's forward on the stages before a rank, all of that rank's work, and the
    last one's backward on its way back, without the weight gradients that may fill the bubble.
    """
    plan = rank.plan
    if plan.pp == 1:
        return mean_us(rank)
    key = ("loads", *plan.parts("stages"), plan.schedule)
    loads, ways = rank.model.once(key, partial(_loads_us, rank))
    least, before = 0.0, 0.0
    for load_us, way_us in zip(loads, ways, strict=True):
        least = max(least, before + plan.microbatches * load_us)
        before += way_us
    return float(least)


def _loads_us(rank: Rank) -> tuple[list[float], list[float]]:
    """By rank a micro-batch's compute on all its layers, and the part that others wait for."""
    each, pp, cut = [], rank.plan.pp, rank.plan.schedule in CUT_BACKWARD
    for c in chunks_of(rank):
        us = sum(n * (x.forward_work.lane_us + x.backward_work.lane_us) for x, n in c.runs)
        off = sum(n * x.weight_us for x, n in c.runs) if cut else 0.0
        each.append((us, us - off))
    loads = [sum(us for us, _ in mine) for mine in dealt(rank.plan, each)]
    return loads, [each[r][1] for r in range(pp)]


def _bounded(search: Search, plan: ParallelPlan, objective: str) -> Iterator[Scored]:
    """Yields a legal plan with its bound, also with uneven stages where they are better balanced.

    Where it exceeds the memory, with recomputation too.
    """
    rank = search.allowed(plan)
    if rank is None:
        return
    scored = search.scored(rank, least_us(rank))
    yield scored
    if plan.first == plan.last == 0 and (other := uneven(rank.model.layers, plan)):
        yield from _bounded(search, other, objective)
    if not scored.fits and not plan.recompute:
        yield from _bounded(search, replace(plan, recompute="full"), objective)


def variants(
    search: Search, plans: Sequence[Scored], objective: str, limit: float = inf
) -> Iterator[Scored]:
    """Yields plans that differ from ``plans`` by a key or two, if their score may be below a limit.

    A pipeline in the V-shaped schedules is no faster than a rank's mean share of all compute;
    others are no faster than the plan's own bound.
    """
    shaped: list[Scored] = []
    for rank in (b.rank for b in plans):
        plan = rank.plan
        plain = plan.schedule == "1f1b" and not plan.recompute and plan.first == plan.last == 0
        if plan.pp > 1 and plain and _score(rank, mean_us(rank), objective) < limit:
            for schedule in V_SHAPED:
                with suppress(ValueError):  # a rule forbids it
                    other = replace(plan, schedule=schedule, virtual=2)
                    shaped += _bounded(search, other, objective)
    yield from shaped
    for rank in (b.rank for b in (*plans, *shaped)):
        if _score(rank, least_us(rank), objective) < limit:
            yield from _others(search, rank, objective)


def _score(rank: Rank, time_us: float, objective: str) -> float:
    """The least score of a plan that takes so long, whatever its memory."""
    return Scored(rank=rank, iteration_us=time_us, memory_bytes=0, fits=True).score(objective)


def _others(search: Search, rank: Rank, objective: str) -> Iterator[Scored]:
    """The plan with local SGD; if it may exceed the memory, with as little recomputation as fits.

    Budgets are tried in tenths, from what the excess leaves of the activations downwards, up to the
    first that fits beyond the memory model's error; where none does, the first that may fit.
    """
    plan, used = rank.plan, memory(rank, search.optimizer)
    if search.local:
        with suppress(ValueError):
            yield from _bounded(search, replace(plan, local=search.local), objective)
    total, room = sum(used.values()), room_bytes(search.book.gpu, plan)
    clear = total <= room and not too_close(total, room)
    excess = max(0, total - room)
    if plan.recompute or clear or excess >= used["activations"]:
        return
    may_fit: list[Scored] = []
    for tenth in range(int(10 * (1 - excess / used["activations"])), 0, -1):
        budget = replace(plan, recompute="budget", recomputed=tenth / 10)
        may_fit += [one for one in list(_bounded(search, budget, objective))[:1] if one.fits]
        if may_fit and not may_fit[-1].close:
            yield may_fit[-1]
            return
    yield from may_fit[: 1 if excess else 0]


class _Found:
    """Legal plans of a search: those that wait to be simulated, and the best so far."""

    def __init__(
        self,
        search: Search,
        objective: str,
        count: int,
        on_plan: Callable[[int, ParallelPlan], None],
    ) -> None:
        self.search, self.objective, self.count, self.on_plan = search, objective, count, on_plan
        self.listed: list[Scored] = []
        self.waiting: list[tuple[float, int]] = []  # a heap of bounds, each with its plan's place
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
    def next(self) -> float:
        """The lowest bound of those that wait."""
        return self.waiting[0][0] if self.waiting else inf

    def _score(self, plan: Scored) -> float:
        return plan.score(self.objective)

    def add(self, plans: Iterable[Scored]) -> None:
        """Let plans wait."""
        for plan in plans:
            heappush(self.waiting, (self._score(plan), len(self.listed)))
            self.listed.append(plan)
            leader = self.best[0] if self.best else self.listed[self.waiting[0][1]]
            self.on_plan(len(self.listed), leader.plan)

    def simulate(self, below: float = inf) -> None:
        """Simulate plans in the order of their bounds, up to a score or that of the last best."""
        while self.next < min(below, self.limit):
            found = self.search.simulated(self.listed[heappop(self.waiting)[1]].rank)
            self.tried.append(found)
            self.best = sorted([*self.best, found], key=self._score)[: self.count]
            self.on_plan(len(self.listed), self.best[0].plan)


@without_garbage_collection()
def best_plans(
    search: Search,
    gpus: int,
    objective: str,
    count: int = 10,
    on_plan: Callable[[int, ParallelPlan], None] = lambda n, best: None,
) -> SearchResult:
    """Returns the ``count`` best plans, found by branch and bound.

    Of what has the lowest bound, a shape's plans are listed, a plan is simulated; until the next
    bound is no better than the score of the last of the best. ``on_plan`` is told how many plans
    are considered, and the best so far. KeyboardInterrupt ends the listing of plans; a second one,
    the simulation.
    """
    found, stopped = _Found(search, objective, count, on_plan), False
    try:
        shapes = shapes_of(search, gpus, objective)
        while shapes.least < found.reach:
            plans = shapes.take(max(shapes.least, min(found.next, found.reach)))
            found.add(_listed(search, plans, objective))
            found.simulate(below=shapes.least)
        found.simulate()
        found.add(variants(search, list(found.listed), objective, found.limit))
    except KeyboardInterrupt:
        stopped = True
    try:
        found.simulate()
    except KeyboardInterrupt:
        stopped = True
    plainest, more = None, list[Scored]()
    if found.best and not stopped:
        plainest, more = simplest(search, found.best[0], found.listed, objective)
    tried = [*found.tried, *more]
    return SearchResult(
        best=found.best,
        considered=len(found.listed),
        simulated=len(tried),
        stopped=stopped,
        simplest=plainest,
        tried=tried,
    )
