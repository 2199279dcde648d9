"""The simplest plan that may be as good as the best one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp

import pytest
from plan_case import search_of

from itercast.capture.plan import ParallelPlan
from itercast.compose.plan_search.candidates import Scored
from itercast.compose.plan_search.search import best_plans
from itercast.compose.plan_search.simplest import PLANS_APART, keys, simplest


def by_keys(listed: Sequence[Scored]) -> Callable[[int], list[Scored]]:
    """Of these plans those with so many keys."""
    return lambda count: [s for s in listed if keys(s.plan) == count]


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("dp=8", 1), ("dp=8,amp,node=dgx-h100", 1), ("dp=2,pp=2,micro=4,schedule=zb", 4)],
)
def test_keys_that_a_search_chooses_are_counted(text: str, count: int) -> None:
    assert keys(ParallelPlan.parse(text)) == count


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_no_simpler_plan_is_as_near_to_the_best(objective: str) -> None:
    """Of all plans, simulated one by one."""
    search = search_of()
    every = best_plans(search, 4, objective, count=1000).best
    found = best_plans(search, 4, objective, count=3)
    limit = every[0].score(objective) * exp(PLANS_APART)
    near = [s for s in every if s.score(objective) <= limit]
    assert found.simplest is not None and found.simplest.score(objective) <= limit
    fewest = min(keys(s.plan) for s in near)
    assert keys(found.simplest.plan) == fewest
    alike = [s for s in near if keys(s.plan) == fewest]
    assert found.simplest.score(objective) == min(s.score(objective) for s in alike)
    assert {str(s.plan) for s in found.tried} >= {str(s.plan) for s in found.best}


def test_the_best_plan_is_the_simplest_where_all_others_have_more_keys() -> None:
    search = search_of()
    listed = best_plans(search, 4, "time", count=1000).best
    plainest = min(listed, key=lambda s: keys(s.plan))
    assert simplest(search, plainest, by_keys(listed), "time") == (plainest, [])


def test_a_plan_too_close_to_the_memory_s_size_is_not_the_simplest() -> None:
    """Neither the best one nor another; one that surely fits may have as many keys.

    Plans ahead of all others are left out: the best one here is the first that has one near it.
    """
    search, near = search_of(), exp(PLANS_APART)
    listed = best_plans(search, 4, "time", count=1000).best
    us = [s.score("time") for s in listed]
    best, *others = listed[next(i for i in range(len(us) - 1) if us[i + 1] <= near * us[i]) :]
    tight = replace(best, close=True)
    found, _ = simplest(search, tight, by_keys([tight, *others]), "time")
    within = [s for s in others if s.score("time") <= best.score("time") * near]
    assert found is not None and keys(found.plan) == min(keys(s.plan) for s in within)
    unsure = by_keys([replace(s, close=True) for s in others])
    assert simplest(search, tight, unsure, "time") == (None, [])
