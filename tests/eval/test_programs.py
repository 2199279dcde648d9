"""The summary of programs beside the clock, with and without what measuring again contradicts."""

from __future__ import annotations

from dataclasses import replace

from itercast.eval.programs import PROGRAMS, captured, lines
from itercast.eval.results import CaseResult
from itercast.microbench.cases.registry import case
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.programs.program import HOST

STEADY = CaseResult(
    case="gpt-m",
    plan="dp=2",
    model="gpt-m",
    ranks=2,
    samples=8,
    predicted_us=110.0,
    predicted_us_p10=90.0,
    predicted_us_p90=120.0,
    measured_us=100.0,
    rounds_us=(100.0, 104.0),
    raw_us=100.0,
    retest_ape_pct=4.0,
    by_family_us={},
    unmodelled_frac=0.0,
)


def test_errors_of_programs_and_plans() -> None:
    """10 and 40 % too long: geometric mean 20, mean 25. The second was measured 50 % apart."""
    disturbed = replace(STEADY, predicted_us=140.0, retest_ape_pct=50.0)
    exact = replace(STEADY, predicted_us=95.0)
    both, calm = lines([(STEADY, exact), (disturbed, replace(exact, retest_ape_pct=50.0))])
    assert both == ("2 (all): programs 20.0 %, bias +25.0; plans 5.0 %, bias -5.0; retest 27.0 %")
    assert calm.startswith("1 (measured twice within 30 %): programs 10.0 %, bias +10.0; plans 5.0")


def test_24_programs_are_measured_on_two_and_four_processes() -> None:
    iterations = [iteration_of(case(name), plan) for name in PROGRAMS for plan in PROGRAMS[name]]
    assert len(iterations) == 24 and {i.ranks for i in iterations} == {2, 4}


def test_a_hand_written_ring_is_captured_on_every_rank() -> None:
    """Cyclic data parallelism sends by isend: two replicas do different work."""
    program = captured(iteration_of(case("gpt-s"), "dp=2,cdp=1"))
    assert list(program.ranks) == [0, 1]
    steps = [[c.args[0] for c in r.calls if c.op == HOST] for r in program.ranks.values()]
    assert "adamw_step" not in steps[0] and "adamw_step" in steps[1]  # the last one updates
