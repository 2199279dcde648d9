"""Summaries of results by hand."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from report_facts import RESULTS
from rich.console import Console

from itercast.eval.compare import results_table
from itercast.eval.results import in_words, summary


def test_a_case_measured_once_has_no_noise_floor() -> None:
    """It is left out of the median, and said where nothing was measured twice."""
    once = replace(RESULTS[0], retest_ape_pct=None)
    assert summary([once, *RESULTS[1:]])["noise_floor_pct"] == 2.0
    assert "noise_floor_pct" not in summary([once])
    assert once.retest_text == "-"
    assert "nothing was measured twice" in in_words([once])


def test_the_summary_says_how_many_intervals_cover_the_measurement() -> None:
    """Measured 100 us: within 90 to 120 us, above 90 to 95 us, below 105 to 120 us."""
    bounds = ((90.0, 120.0), (90.0, 95.0), (105.0, 120.0))
    results = [
        replace(RESULTS[0], measured_us=100.0, predicted_us_p10=low, predicted_us_p90=high)
        for low, high in bounds
    ]
    assert [r.covered for r in results] == [True, False, False]
    assert summary(results)["coverage_pct"] == pytest.approx(100 / 3)
    assert "80 % intervals cover 33 %" in in_words(results)


def test_summary_by_hand() -> None:
    found = summary(RESULTS)  # errors +10, -10, -20 %
    assert found["mape_pct"] == pytest.approx(40 / 3)
    assert found["median_ape_pct"] == pytest.approx(10)
    assert found["worst_ape_pct"] == pytest.approx(20)
    assert found["geomean_ape_pct"] == pytest.approx((10 * 10 * 20) ** (1 / 3))
    assert found["bias_pct"] == pytest.approx(-20 / 3)
    with pytest.raises(ValueError, match="no results"):
        summary([])


def test_a_long_plan_is_whole_on_80_columns() -> None:
    """It goes on in the next line of its column; no number is cut."""
    plan = "dp=2,pp=2,micro=8,schedule=interleaved:2,recompute=full"
    text = StringIO()
    table = results_table([replace(RESULTS[0], case="resnet-m", plan=plan)])
    Console(width=80, file=text).print(table)
    lines = text.getvalue().splitlines()
    (first,) = (line for line in lines if line.startswith("resnet-m"))
    start = first.index(plan[:8])
    rows = lines[lines.index(first) :][:4]
    assert plan in "".join(line[start : start + 30].split(" ")[0] for line in rows)
    assert first.split()[-5:] == ["1.10", "1.00", "+10.0", "2.0", "0.0"]
