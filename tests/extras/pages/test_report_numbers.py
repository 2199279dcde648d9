"""Numbers of the report on results that are small enough to check by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from plan_case import forecast_of
from report_facts import FIT, OPS, case, op

from itercast.eval.error_parts import error_parts, factors
from itercast.eval.intervals import LEVELS, at_stated, coverage_pct
from itercast.eval.iteration_parts import PARTS, parts_us
from itercast.extras.pages.op_errors import by_condition, by_family, kinds, reason, sizes, worst
from itercast.extras.pages.sections import case_reason

FORECAST = forecast_of(
    iteration_us=100.0,
    compute_us=70.0,
    exposed_comm_us=12.0,
    idle_us=18.0,
    by_family_us={"gemm": 50.0, "unmodelled": 20.0, "collective": 40.0},
    idle_by_us={"host": 8.0, "bubble": 6.0, "waiting": 4.0},
)


def test_parts_of_a_forecast_add_up() -> None:
    """Compute 70 = 50 + 20 without a model, messages 12, host gaps 8, bubble and waiting 10."""
    found = parts_us(FORECAST)
    assert list(found) == list(PARTS)
    assert list(found.values()) == pytest.approx([50, 8, 12, 10, 0, 20])


def test_assumed_time_is_taken_out_of_the_part_it_belongs_to() -> None:
    """All 8 of the host, 5 of messages, and of compute what is not the uncovered 20 anyway: 3."""
    assumed = {"host.event_us": 8.0, "alpha_beta.step_us": 5.0, "fallbacks.gemm": 23.0}
    found = parts_us(replace(FORECAST, assumed_by_us=assumed))
    assert list(found.values()) == pytest.approx([47, 0, 7, 10, 16, 20])


def test_on_a_cpu_the_host_is_part_of_compute() -> None:
    """60 of 70 us of ops are the host's; compute takes 35 as its lane overlaps nothing."""
    ops = {"host": 60.0, "gemm": 10.0}
    found = parts_us(replace(FORECAST, by_family_us=ops, compute_us=35.0, idle_by_us={}))
    assert found["host"] == pytest.approx(30) and found["kernels"] == pytest.approx(5)


def test_errors_by_family() -> None:
    """gemm: 10, 10, 20 and 200 %, median 15; the retest error is that of all its rows."""
    found = by_family(OPS, FIT)
    assert list(found)[2] == "gemm" and set(found) == {"host", "norm", "gemm"}
    gemm = found["gemm"]
    assert (gemm["rows"], gemm["noise_floor_pct"]) == (4, 3.0)
    assert gemm["median_ape_pct"] == pytest.approx(15)
    assert gemm["p90_ape_pct"] == pytest.approx(20 + 0.7 * 180)
    assert gemm["bias_pct"] == pytest.approx((10 - 10 + 20 + 200) / 4)
    assert "noise_floor_pct" not in found["norm"]
    assert by_family(OPS, {})["gemm"]["noise_floor_pct"] == 5.0


def test_errors_by_size_and_condition() -> None:
    """Groups of fewer than three rows are left out: bf16, 2 MiB, cold."""
    found = by_condition(OPS)
    named = {"size: up to 4 KiB", "dtype: fp32", "gpu: toy", "threads: 2", "cache: warm"}
    assert set(found) == named
    assert found["size: up to 4 KiB"]["rows"] == 4
    assert sizes(OPS).tolist()[3:] == ["up to 4 KiB", "1 to 16 MiB", ""]
    assert kinds(OPS).tolist()[3:] == [
        "matrix products",
        "memory-bound ops",
        "optimizer, host, messages",
    ]


def test_the_worst_are_off_by_the_largest_factor() -> None:
    """+200 % is a factor of 3, -50 % one of 2; of one op measured twice only the worse."""
    again = OPS.assign(predicted_us=OPS["predicted_us"] * [1, 1, 1, 1.1, 1, 1])
    found = worst(again, 3)
    assert found["error_pct"].tolist() == pytest.approx([230, -50, -50])
    both = pd.concat([OPS, pd.DataFrame([op(31, 10, params="m=4")])], ignore_index=True)
    assert worst(both, 1)["error_pct"].tolist() == pytest.approx([210])
    assert worst(both, 2)["error_pct"].tolist()[1] == pytest.approx(-50)


def test_each_reason_of_a_bad_forecast() -> None:
    """An error of 50 %: samples must spread by 25 % to excuse it, a neighbour be 4 times away."""
    assert reason(op(5, 10)).startswith("none of these")
    assert reason(op(5, 10, outside="log_m")).startswith("out of envelope: log_m")
    assert "nearest is 2.5 doublings away" in reason(op(5, 10, neighbour_log2=2.5))
    assert "was measured: no row" in reason(op(5, 10, neighbour_log2=np.inf))
    assert reason(op(5, 10, spread_pct=26.0)) == "noisy measurement: samples differ by 26 %"
    assert reason(op(5, 10, retest_pct=30.0)) == "noisy measurement: two timings differ by 30 %"
    assert "noisy" not in reason(op(5, 10, spread_pct=24.0, retest_pct=24.0))


def test_each_reason_of_a_bad_iteration() -> None:
    """Its interval reaches 10 % to both sides."""
    assert case_reason(case("a", 1000, 1050)) == "none of these: inside its 80 % interval"
    assert case_reason(case("a", 1000, 2000)) == "outside its 80 % interval"
    assert case_reason(case("a", 1000, 1030)) == "noisy measurement: two rounds differ by 2 %"
    parts = {"kernels": 700.0, "assumed": 100.0, "uncovered": 200.0}
    told = case_reason(case("a", 1000, 1050, **parts))
    assert told == "no model covers 20 % of it; assumed numbers decide 10 % of it"


def test_coverage_at_the_stated_level_counts_what_lies_inside() -> None:
    """Of 11, 9, 13 and 7 two lie between 8 and 12.5; at 95 % the interval is 1.53 times as wide."""
    measured = np.array([11.0, 9.0, 13.0, 7.0])
    ten = np.full(4, 10.0)
    found = coverage_pct(measured, ten, ten / 1.25, ten * 1.25)
    assert at_stated(found) == 50
    # 1.25 ** 1.529 = 1.407: 13 is inside, and so is 7 (below 10 / 1.407 = 7.1? no)
    assert found[LEVELS.index(0.95)] == 75
    assert found == sorted(found)


def test_factors_of_one_part_by_hand() -> None:
    """A share of 0.8 with an error of 0.2: 0.8 * 0.2 / 0.05^2 over 0.8^2 / 0.05^2 + 1 / 0.2^2."""
    factor = factors([case("a", 100, 125, host=100)])
    assert factor["host"] == pytest.approx(64 / (256 + 25))
    assert factor["kernels"] == factor["communication"] == 0


def test_the_error_is_put_down_to_the_part_that_explains_it() -> None:
    """Kernels are right, the host takes 30 % more than forecast in all cases."""
    shares = np.linspace(0.1, 0.5, 20)
    cases = [case("a", 100, 100 + 30 * h, kernels=100 * (1 - h), host=100 * h) for h in shares]
    factor = factors(cases)
    assert factor["host"] == pytest.approx(0.3, abs=0.05)
    assert factor["kernels"] == pytest.approx(0, abs=0.02)


def test_a_waterfall_ends_at_the_measured_time() -> None:
    """Forecast, corrections and the rest add up to 100 % of what was measured."""
    cases = [case("a", 100, 130, kernels=60, host=40), case("b", 100, 90, kernels=90, host=10)]
    one = error_parts(cases, "both", factors(cases))
    whole = sum(one.forecast.values()) + sum(one.correction.values()) + one.unexplained
    assert whole == pytest.approx(100)
    assert one.forecast["kernels"] == pytest.approx(50 * (60 / 130 + 90 / 90))
