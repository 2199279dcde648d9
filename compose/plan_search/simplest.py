"""Finds the simplest plan that forecasts cannot tell from the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import lru_cache
from math import exp, inf

from itercast.capture.base.assumptions import assumed
from itercast.capture.plan import ParallelPlan
from itercast.compose.plan_search.candidates import Scored, Search

PLANS_APART: float = assumed(__file__, "plans_apart")
GIVEN = ("node", "amp", "nodes")  # keys that a search does not choose


@lru_cache(maxsize=2**14)
def keys(plan: ParallelPlan) -> int:
    """How many keys of a plan are chosen by a search or a user."""
    parts = str(plan).split(",")
    return sum(part.partition("=")[0] not in GIVEN and part != "dp=1" for part in parts)


def simplest(
    search: Search, best: Scored, near: Callable[[int], Iterable[Scored]], objective: str
) -> tuple[Scored | None, list[Scored]]:
    """The plan with the fewest keys whose time or cost is within PLANS_APART of the best one's.

    The best of those with equally few keys. Plans that may not fit in memory (``Scored.close``) are
    left out; None if no plan is left. ``near(n)`` returns the legal plans with n keys, with lower
    bounds of their times. Also returns the plans that were simulated on the way.
    """
    limit = best.score(objective) * (exp(PLANS_APART) if objective != "memory" else 1.0)
    most = len(fields(ParallelPlan)) if best.close else keys(best.plan)
    tried: list[Scored] = []
    for count in range(most):
        best_of_count: Scored | None = None
        bounded = [b for b in near(count) if b.score(objective) <= limit and not b.close]
        for candidate in sorted(bounded, key=lambda b: b.score(objective)):
            best_score = best_of_count.score(objective) if best_of_count else inf
            if candidate.score(objective) >= best_score:
                break
            simulated = search.simulated(candidate.rank)
            tried.append(simulated)
            if simulated.score(objective) <= limit and simulated.score(objective) < best_score:
                best_of_count = simulated
        if best_of_count is not None:
            return best_of_count, tried
    return None if best.close else best, tried
