"""The report in a real headless browser: what a reader sees on a desk, on a phone, at night."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import browser, console_errors, outside_requests
from report_facts import DEVICE, OPS

from itercast.eval.report.page import render
from itercast.eval.report.sections import sections, tiles

MOST_BYTES = 3e6
CHARTS = 8


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a device with more held-out rows than a chart shows."""
    ops = OPS.loc[OPS.index.repeat(400)].reset_index(drop=True)
    ops["measured_us"] *= 1.001 ** (ops.index % 997)
    device = replace(DEVICE, ops=ops)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render("toy", tiles(device), sections(device), {}, {}))
    return path


Open = Callable[..., Any]


@pytest.fixture
def opened(page: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens the page and waits until the charts in sight are drawn."""
    windows = []

    def open_page(**how: Any) -> Any:
        window = browser(tmp_path / f"profile{len(windows)}", **how)
        windows.append(window)
        driver = window.__enter__()
        driver.get(page.as_uri())
        drawn_s(driver)
        return driver

    yield open_page
    for window in windows:
        window.__exit__(None, None, None)


def drawn_s(driver: Any) -> float:
    """Seconds from the navigation until the charts in sight were drawn."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        marks = driver.execute_script(
            "return performance.getEntriesByName('drawn').map((m) => m.startTime)"
        )
        if marks:
            return float(marks[0]) / 1e3
        time.sleep(0.05)
    raise AssertionError(f"no chart is drawn; console: {console_errors(driver)}")


def scrolled(driver: Any) -> int:
    """Scroll to the end of the page; returns how many charts are drawn."""
    for _ in range(60):
        driver.execute_script("scrollBy({top: 500, behavior: 'instant'})")
        time.sleep(0.1)
        found = driver.execute_script(
            "return [...document.querySelectorAll('.chart')]"
            ".filter((c) => c.querySelector('.main-svg')).length"
        )
        if found == CHARTS:
            break
    return int(found)


def test_all_charts_are_drawn_without_errors_or_outside_requests(opened: Open) -> None:
    driver = opened()
    assert scrolled(driver) == CHARTS
    points = driver.execute_script(
        "return document.querySelectorAll('#chart-iterations .point').length"
    )
    assert points == len(DEVICE.results)
    for axis in ("xtitle", "ytitle"):
        titles = driver.execute_script(
            f"return document.querySelector('#chart-iterations .{axis}')"
        )
        assert titles is not None
    assert driver.execute_script(
        "return document.querySelectorAll('#chart-ops .legendtext').length"
    )
    assert console_errors(driver) == [] and outside_requests(driver) == []


def test_outside_requests_would_be_seen(opened: Open) -> None:
    driver = opened()
    driver.execute_script("new Image().src = 'http://outside.invalid/x.png'")
    end = time.monotonic() + 20
    found: list[str] = []
    while not found and time.monotonic() < end:
        found += outside_requests(driver)
    assert found == ["http://outside.invalid/x.png"]


def test_only_charts_in_sight_are_drawn_of_a_page_that_is_small(opened: Open, page: Path) -> None:
    """Which keeps the page quick to load, with 400 times the rows of a chart."""
    drawn = opened().execute_script("return document.querySelectorAll('.main-svg').length")
    assert 0 < drawn < CHARTS
    assert page.stat().st_size <= MOST_BYTES


def test_hovering_shows_what_a_point_is(opened: Open) -> None:
    driver = opened()
    driver.execute_script("Plotly.Fx.hover('chart-iterations', [{curveNumber: 2, pointNumber: 0}])")
    shown = driver.execute_script(
        "return document.querySelector('#chart-iterations .hoverlayer').textContent"
    )
    assert "predicted 1.1 ms, measured 1 ms" in shown and "error +10.0 %" in shown


def test_a_reader_chooses_what_is_shown(opened: Open) -> None:
    """The waterfall of one case: a choice redraws the chart."""
    driver = opened()
    scrolled(driver)
    script = "return document.querySelector('#chart-waterfall').textContent"
    before = driver.execute_script(script)
    driver.execute_script(
        "const s = document.querySelector('select[data-for=chart-waterfall]');"
        "s.value = 'plan-c dp=2';"
        "s.dispatchEvent(new Event('change'))"
    )
    time.sleep(0.5)
    after = driver.execute_script(script)
    assert after != before and "80" in after  # forecast 1600 of 2000


def test_a_phone_needs_no_sideways_scrolling(opened: Open) -> None:
    driver = opened(width=390, height=844)
    assert scrolled(driver) == CHARTS
    widths = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1] == 390
    charts = driver.execute_script(
        "return [...document.querySelectorAll('.chart .main-svg')].map((s) => s.clientWidth)"
    )
    assert max(charts) <= 390


def test_dark_mode_has_its_own_colours_and_enough_contrast(opened: Open) -> None:
    """Text on paper differs by WCAG's 4.5, in both modes."""
    papers = []
    for dark in (False, True):
        driver = opened(dark=dark)
        paper, ink, axis = driver.execute_script(
            "const style = (q, p) => getComputedStyle(document.querySelector(q))[p];"
            "return [style('body', 'backgroundColor'), style('body', 'color'),"
            " style('#chart-iterations .xtitle', 'fill')]"
        )
        papers.append(luminance(paper))
        for text in (ink, axis):
            light, low = sorted((luminance(text), luminance(paper)), reverse=True)
            assert (light + 0.05) / (low + 0.05) >= 4.5
    assert papers[0] > 0.9 and papers[1] < 0.1


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    parts = [int(v) / 255 for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_without_javascript_the_tables_have_all_numbers(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as driver:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        driver.get(page.as_uri())
        text = driver.find_element("tag name", "body").text
    for told in ("Charts need JavaScript", "10.0 %", "out of envelope", "All numbers"):
        assert told in text
