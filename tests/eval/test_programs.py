"""The summary of programs beside the clock, with and without what measuring again contradicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_facts import case

from itercast.eval.programs import PROGRAMS, captured, scores
from itercast.microbench.cases.registry import case as named
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.programs.program import HOST


def test_errors_of_programs_and_plans() -> None:
    """10 and 40 % too long: geometric mean 20, mean 25. The second was measured 50 % apart."""
    steady, disturbed = case("a", 110, 100), case("b", 140, 100)
    exact = case("a", 95, 100)
    pairs = [(steady, exact), (disturbed, replace(exact, retest_ape_pct=50.0))]
    found = scores(pairs)
    both, calm = (found[f"programs, {n}"] for n in ("all (2)", "measured twice within 30 % (1)"))
    assert (both["geomean_ape_pct"], both["bias_pct"]) == pytest.approx((20.0, 25.0))
    assert (calm["geomean_ape_pct"], calm["bias_pct"]) == pytest.approx((10.0, 10.0))
    assert found["plans, all (2)"]["bias_pct"] == pytest.approx(-5.0)


def test_24_programs_are_measured_on_two_and_four_processes() -> None:
    iterations = [iteration_of(named(name), plan) for name in PROGRAMS for plan in PROGRAMS[name]]
    assert len(iterations) == 24 and {i.ranks for i in iterations} == {2, 4}


def test_a_hand_written_ring_is_captured_on_every_rank() -> None:
    """Cyclic data parallelism sends by isend: two replicas do different work."""
    program = captured(iteration_of(named("gpt-s"), "dp=2,cdp=1"))
    assert list(program.ranks) == [0, 1]
    steps = [[c.args[0] for c in r.calls if c.op == HOST] for r in program.ranks.values()]
    assert "adamw_step" not in steps[0] and "adamw_step" in steps[1]  # the last one updates
