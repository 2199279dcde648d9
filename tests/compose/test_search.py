"""Plan search: what it finds is what trying everything finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plan_case import GPU, capture_at, experts_at, search_of

from compose.parallel.plan import ParallelPlan
from compose.search import Search, _candidates, best_plans
from compose.simulate.iteration import evaluate, quick_us
from compose.simulate.stage_rank import least_us, memory
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture


@pytest.fixture(scope="module")
def search() -> Search:
    return search_of()


@pytest.mark.parametrize("capture", [capture_at, experts_at])
def test_no_better_plan_is_left_out(capture: Callable[[int, int], StepCapture]) -> None:
    search = search_of(capture_at=capture)
    found = best_plans(search, 4, "time", count=5)
    ranks = [r for p in _candidates(search, 4) if (r := search.allowed(p)) is not None]
    times = sorted(quick_us(r, "adamw") for r in ranks)
    assert [s.iteration_us for s in found.best] == pytest.approx(times[:5])
    assert found.simulated < found.considered == len(ranks)
    assert all(least_us(r) <= quick_us(r, "adamw") for r in ranks)


def test_experts_are_spread_over_what_divides_them_and_dp(search: Search) -> None:
    """Four experts, 3 GPUs: over none of them; a model without experts: never."""
    mixture = search_of(capture_at=experts_at)
    assert {(p.dp, p.ep) for p in _candidates(mixture, 4) if p.tp * p.pp == 1} == {
        *((4, 1), (4, 2), (4, 4))
    }
    assert {p.ep for p in _candidates(mixture, 3)} <= {1}
    assert {p.ep for p in _candidates(search, 4)} == {1}


def test_a_gpu_too_small_for_all_experts_holds_some_of_them() -> None:
    """Their bytes shrink with ep: no bound may forbid what fits."""
    ranks = {
        str(p): r
        for p in _candidates(search_of(capture_at=experts_at), 4)
        if (r := search_of(capture_at=experts_at).allowed(p)) is not None and p.pp * p.tp == 1
    }
    spread = min(sum(memory(r, "adamw").values()) for r in ranks.values() if r.plan.ep > 1)
    tight = Gpu(**{**GPU.to_dict(), "hbm_bytes": spread * 1.01})
    best = best_plans(search_of(tight, experts_at), 4, "memory", count=3).best
    assert best[0].fits and best[0].memory_bytes <= spread


@pytest.mark.parametrize("text", ["dp=2,zero=3,accumulate=2", "accumulate=2", "dp=2,cdp=1", "pp=2"])
def test_a_quick_time_is_the_whole_forecasts(search: Search, text: str) -> None:
    """Every micro-batch synchronised, the last one only, cyclic, and in a pipeline."""
    rank = search.rank(ParallelPlan.parse(text))
    assert quick_us(rank, "adamw") == pytest.approx(evaluate(rank, "adamw").iteration_us)


def test_every_plan_uses_the_gpus_it_was_given(search: Search) -> None:
    assert {s.plan.world_size for s in best_plans(search, 4, "time").best} == {4}
    cheap = best_plans(search, 4, "cost").best[0]
    assert cheap.plan.world_size in (1, 2, 4)
    small = best_plans(search, 4, "memory").best
    assert [s.memory_bytes for s in small] == sorted(s.memory_bytes for s in small)


def test_plans_that_do_not_fit_come_last(search: Search) -> None:
    ranks = [r for p in _candidates(search, 4) if (r := search.allowed(p)) is not None]
    sizes = sorted(sum(memory(r, "adamw").values()) for r in ranks)
    tight = Gpu(**{**GPU.to_dict(), "hbm_bytes": float(sizes[len(sizes) // 2])})
    found = best_plans(search_of(tight), 4, "time", count=1000).best
    fits = [s.fits for s in found]
    assert True in fits and fits == sorted(fits, reverse=True)


def test_a_wrong_objective_is_one_line(search: Search) -> None:
    with pytest.raises(ValueError, match="objective 'speed': allowed are time, cost, memory"):
        best_plans(search, 4, "speed")
