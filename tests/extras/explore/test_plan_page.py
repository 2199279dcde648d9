"""The page of a plan search in a real browser, on a desk and on a phone."""

import time
from pathlib import Path
from typing import Any

import pytest
from browser import console_errors, outside_requests, serious_findings, shown_as
from plan_case import search_of

from itercast.compose.parallel.device_memory import FITS, MISFITS
from itercast.compose.plan_search.search import best_plans
from itercast.extras.explore.plan_page import memory_held, plan_page

CLOSE = "too close: 76 to 84 of 80 GB"


@pytest.fixture(scope="module")
def searched() -> tuple[Any, ...]:
    """What a page shows of a small GPT's plans on four GPUs."""
    search = search_of()
    found = best_plans(search, 4, "time", count=5)
    assert found.simplest is not None
    simple = str(found.simplest.plan)
    reports = {str(s.plan): search.report(s.plan, "") for s in (*found.best, found.simplest)}
    tried = [(str(s.plan), s.iteration_us, s.memory_bytes, FITS) for s in found.tried]
    close, large = (("dp=4,micro=9", 2e5, 80, CLOSE), ("dp=4,micro=8", 1e5, 99, MISFITS))
    tried += [large, close]
    held = {plan: memory_held(search, reports_plan) for plan, reports_plan in _plans(found).items()}
    facts = {"case": "gpt-s", "gpu": "toy-gpu", "gpus": 4, "global_batch": 8, "seq": 64}
    facts |= {"dtype": "fp32", "optimizer": "adamw"}
    return facts, tried, reports, [str(s.plan) for s in found.best], simple, held


@pytest.fixture(scope="module")
def page(searched: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plans.html"
    path.write_text(plan_page(*searched))
    assert searched[3][0] in path.read_text()
    return path


def test_a_memory_curve_of_many_points_keeps_its_peak(searched: tuple[Any, ...]) -> None:
    """Of 4,000 points one in ten is drawn: the highest of each ten, not the first."""
    *others, held = searched
    curve = [(float(i), 987.0 * 1e9 * (i == 1234)) for i in range(4000)]
    assert "987" in plan_page(*others, {plan: {"rank 0": curve} for plan in held})


def _plans(found: Any) -> dict[str, Any]:
    return {str(s.plan): s.plan for s in (found.best[0], found.simplest)}


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_all_plans_are_points_and_nothing_serious_is_found(
    driver: Any, page: Path, width: int, dark: bool
) -> None:
    shown_as(driver, width=width, height=3000, dark=dark)
    driver.get(page.as_uri())
    end = time.monotonic() + 60
    drawn = "return document.querySelectorAll('.chart:has(.main-svg)').length"
    while driver.execute_script(drawn) < 3:
        assert time.monotonic() < end, console_errors(driver)
        time.sleep(0.1)
    rows = driver.execute_script(
        "return document.querySelectorAll('#tried tbody tr, #tried tr').length"
    )
    points = driver.execute_script("return document.querySelectorAll('#tried .point').length")
    assert points == rows - 1 > 3  # a row is the head
    cells = driver.execute_script(
        "return [...document.querySelectorAll('#tried td:last-child')].map(x => x.textContent)"
    )
    assert cells == [FITS] * (len(cells) - 2) + [CLOSE, MISFITS]  # in this order
    assert driver.execute_script("return document.querySelectorAll('#memory .lines').length")
    bars = driver.execute_script("return document.querySelectorAll('#parts .bars .point').length")
    assert bars >= 2 * 5
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert serious_findings(driver) == []
    assert console_errors(driver) == [] and outside_requests(driver) == []
