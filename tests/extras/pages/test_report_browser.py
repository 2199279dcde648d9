"""The report in a real headless browser: what a reader sees on a desk, on a phone, at night."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import console_errors, outside_requests, serious_findings, shown_as
from report_facts import DEVICE, OPS

from itercast.extras.pages.page import render
from itercast.extras.pages.sections import sections, tiles

MOST_BYTES = 3e6
CHARTS = 7
STYLES = """
const style = (q, p) => getComputedStyle(document.querySelector(q))[p];
return [style('body', 'backgroundColor'), style('body', 'color'),
        style('#chart-iterations .xtitle', 'fill')]
"""
CHOICE = """
const s = document.querySelector('select[data-for=chart-waterfall]');
s.value = 'plan-c dp=2';
s.dispatchEvent(new Event('change'))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a device with more held-out rows than a chart shows."""
    ops = OPS.loc[OPS.index.repeat(400)].reset_index(drop=True)
    ops["measured_us"] *= 1.001 ** (ops.index % 997)
    device = replace(DEVICE, ops=ops)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render("toy", tiles(device), sections(device), {}, {}))
    return path


def opened(driver: Any, page: Path, **how: Any) -> None:
    """Open the page anew and wait until the charts in sight are drawn."""
    shown_as(driver, **how)
    driver.get(page.as_uri())
    end = time.monotonic() + 60
    while not driver.execute_script("return performance.getEntriesByName('drawn').length"):
        assert time.monotonic() < end, f"no chart is drawn; console: {console_errors(driver)}"
        time.sleep(0.05)


def count(driver: Any, query: str) -> int:
    return int(driver.execute_script(f"return document.querySelectorAll('{query}').length"))


def text(driver: Any, query: str) -> str:
    return str(driver.execute_script(f"return document.querySelector('{query}').textContent"))


def scrolled(driver: Any) -> int:
    """Scroll to each chart and wait until it is drawn; returns how many are."""
    for chart in driver.find_elements("css selector", ".chart"):
        end = time.monotonic() + 60
        while not chart.find_elements("css selector", ".main-svg") and time.monotonic() < end:
            chart.parent.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", chart)
            time.sleep(0.05)
    return count(driver, ".chart:has(.main-svg)")


def test_a_desk_has_all_charts_and_asks_nobody_else(driver: Any, page: Path) -> None:
    """Charts out of sight are drawn later, which keeps the page quick to load; it is small."""
    opened(driver, page)
    assert 0 < count(driver, ".chart:has(.main-svg)") < CHARTS
    assert page.stat().st_size <= MOST_BYTES
    assert scrolled(driver) == CHARTS
    assert count(driver, "#chart-iterations .point") == len(DEVICE.results)
    for part in ("iterations .xtitle", "iterations .ytitle", "ops .legendtext"):
        assert count(driver, f"#chart-{part}")
    driver.execute_script("Plotly.Fx.hover('chart-iterations', [{curveNumber: 2, pointNumber: 0}])")
    told = text(driver, "#chart-iterations .hoverlayer")
    assert "predicted 1.1 ms, measured 1 ms" in told and "error +10.0 %" in told
    before = text(driver, "#chart-waterfall")
    driver.execute_script(CHOICE)
    time.sleep(0.5)
    after = text(driver, "#chart-waterfall")
    assert after != before and "80" in after  # forecast 1600 of 2000
    assert console_errors(driver) == [] and outside_requests(driver) == []
    driver.execute_script("new Image().src = 'http://outside.invalid/x.png'")
    end, found = time.monotonic() + 20, list[str]()
    while not found and time.monotonic() < end:
        found += outside_requests(driver)
    assert found == ["http://outside.invalid/x.png"]  # it would have been seen


def test_a_phone_needs_no_sideways_scrolling(driver: Any, page: Path) -> None:
    opened(driver, page, width=390, height=844)
    assert scrolled(driver) == CHARTS
    widths = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1] == 390
    charts = driver.execute_script(
        "return [...document.querySelectorAll('.chart .main-svg')].map((s) => s.clientWidth)"
    )
    assert max(charts) <= 390


def test_dark_mode_has_its_own_colours_and_enough_contrast(driver: Any, page: Path) -> None:
    """Text on paper differs by WCAG's 4.5, in both modes."""
    papers = []
    for dark in (False, True):
        opened(driver, page, dark=dark)
        paper, *inks = driver.execute_script(STYLES)
        papers.append(luminance(paper))
        for ink in inks:
            low, light = sorted((luminance(ink), luminance(paper)))
            assert (light + 0.05) / (low + 0.05) >= 4.5
    assert papers[0] > 0.9 and papers[1] < 0.1


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_axe_finds_nothing_serious(driver: Any, page: Path, width: int, dark: bool) -> None:
    """On a desk and on a phone, with charts drawn and a table open."""
    opened(driver, page, width=width, dark=dark)
    assert scrolled(driver) == CHARTS
    driver.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert serious_findings(driver) == []
    driver.execute_script("document.documentElement.lang = ''")
    assert serious_findings(driver)  # it would have been found


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    parts = [int(v) / 255 for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_without_javascript_the_tables_have_all_numbers(driver: Any, page: Path) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    driver.get(page.as_uri())
    told = driver.find_element("tag name", "body").text
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for part in ("Charts need JavaScript", "10.0 %", "out of envelope", "All numbers"):
        assert part in told
