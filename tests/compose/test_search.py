"""Plan search: what it finds is what trying everything finds."""

from __future__ import annotations

import pytest
from conftest import Flat

from compose.evaluate import quick_us
from compose.priced import PriceBook
from compose.search import Search, _candidates, best_plans
from compose.stage_rank import least_us, memory
from itercast.api import capture_case
from microbench.cases.registry import case
from microbench.hardware.spec import Gpu
from microbench.opcall import StepCapture

GPU = Gpu(
    name="toy-gpu",
    peak_flops_per_s={"fp32": 1e12},
    l2_bytes=1e12,
    hbm_bytes=1e9,
    link_bytes_per_s=1e11,
)


def capture_at(batch: int, seq: int) -> StepCapture:
    return capture_case(case("gpt-s"), batch=batch, seq=seq)


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(
        capture_at=capture_at,
        book=PriceBook(Flat(), GPU, 0),
        node=None,
        batch=8,
        seq=64,
        optimizer="adamw",
    )


def test_no_better_plan_is_left_out(search: Search) -> None:
    found = best_plans(search, 4, "time", count=5)
    ranks = [r for p in _candidates(search, 4) if (r := search.allowed(p)) is not None]
    times = sorted(quick_us(r, "adamw") for r in ranks)
    assert [s.iteration_us for s in found.best] == pytest.approx(times[:5])
    assert found.simulated < found.considered == len(ranks)
    assert all(least_us(r) <= quick_us(r, "adamw") for r in ranks)


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
    narrow = Search(
        capture_at=capture_at,
        book=PriceBook(Flat(), tight, 0),
        node=None,
        batch=8,
        seq=64,
        optimizer="adamw",
    )
    found = best_plans(narrow, 4, "time", count=1000).best
    fits = [s.fits for s in found]
    assert True in fits and fits == sorted(fits, reverse=True)


def test_a_wrong_objective_is_one_line(search: Search) -> None:
    with pytest.raises(ValueError, match="objective 'speed': allowed are time, cost, memory"):
        best_plans(search, 4, "speed")
