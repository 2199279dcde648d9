"""Results summed up by hand: errors, noise floors, orders of plans, programs beside plans."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from report_facts import RESULTS, case
from rich.console import Console

from itercast.capture.cases.registry import case as named
from itercast.capture.programs.program import HOST
from itercast.eval.compare import quiet_rounds, results_table, stated_rows
from itercast.eval.ranking import choices, ranking_lines, ranking_metrics, rankings
from itercast.eval.results import CaseResult, in_words, summary
from itercast.extras.benchmarks.programs import PROGRAMS, captured, scores
from itercast.microbench.iterations.collect import iteration_of


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


def test_a_round_whose_anchor_was_slow_does_not_count() -> None:
    """Anchors take 1.02, 1.04, 1.1 and 1.5 times those of the quieter round; usual is 1.07.

    The limit is 1.07 ** 3 = 1.22. One round alone counts, and one without an anchor.
    """
    rounds = {"a": (100, 102), "b": (104, 100), "c": (100, 110), "d": (150, 100), "e": (300,)}
    rows = pd.DataFrame(
        [{"case": case, "anchor_us": us} for case, some in rounds.items() for us in some]
    )
    assert quiet_rounds(rows, ["case"]).tolist() == [*[True] * 6, False, True, True]
    rows.loc[6, "anchor_us"] = np.nan
    assert quiet_rounds(rows, ["case"]).all()
    assert quiet_rounds(rows.drop(columns="anchor_us"), ["case"]).all()


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
    table = results_table([replace(RESULTS[0], model="resnet-m", plan=plan)])
    Console(width=80, file=text).print(table)
    lines = text.getvalue().splitlines()
    (first,) = (line for line in lines if line.startswith("resnet-m"))
    start = first.index(plan[:8])
    rows = lines[lines.index(first) :][:7]
    assert plan in "".join(line[start : start + 30].split(" ")[0] for line in rows)
    assert first.split()[-5:] == ["1.10", "1.00", "+10.0", "2.0", "0.0"]


def of(plan: str, predicted_us: float, measured_us: float, ranks: int, samples: int) -> CaseResult:
    """A plan of one model."""
    one = replace(case("a", predicted_us, measured_us), plan=plan)
    return replace(one, ranks=ranks, samples=samples)


# us: predicted 40, 32, 28, 36 against measured 40, 36, 32, 28: 4 of 6 pairs in order
PLANS = [
    of("dp=2", 40, 40, 2, 4),
    of("cp=2", 32, 36, 2, 4),
    of("tp=2", 28, 32, 2, 4),
    of("pp=2", 36, 28, 2, 4),
]


def test_tau_counts_pairs_of_plans_of_one_step() -> None:
    """Another batch, more ranks and one process are other steps, though fast or slow a sample."""
    others = [of("dp=2", 10, 90, 2, 8), of("tp=4", 9, 99, 4, 4), of("", 1, 50, 1, 4)]
    assert rankings([*PLANS, *others]) == rankings(PLANS)
    assert choices([*PLANS, *others]) == choices(PLANS)
    found = rankings(PLANS)
    assert [(r.model, r.plans) for r in found] == [("a", 4)]
    assert found[0].kendall_tau == pytest.approx((4 - 2) / 6)
    assert found[0].retest_tau is None  # measured once
    assert rankings(PLANS[:2]) == []  # two plans are no ranking


def test_the_noise_floor_of_a_ranking_is_another_round() -> None:
    """40, 36, 32 us and then 40, 32, 36: two of three pairs as before."""
    rounds = zip(PLANS[:3], (40, 36, 32), (40, 32, 36), strict=True)
    twice = [replace(r, rounds_us=(first, again)) for r, first, again in rounds]
    assert rankings(twice)[0].retest_tau == pytest.approx(1 / 3)
    assert "two rounds of measurements: 0.33" in ranking_lines(twice)[0]


def test_the_chosen_plan_is_judged_by_its_measured_time() -> None:
    """Of four plans on two ranks tp=2 is chosen: 32 us, the best one takes 28."""
    (found,) = choices(PLANS)
    assert (found.chosen, found.best, found.ranks, found.plans) == ("tp=2", "pp=2", 2, 4)
    assert found.slower_pct == pytest.approx(100 / 7)
    right = [*PLANS[:2], replace(PLANS[2], measured_us=29), PLANS[3]]
    assert choices(right)[0].slower_pct == pytest.approx(100 * (29 / 28 - 1))
    assert ranking_metrics(right)["chosen_close_frac"] == 1.0
    assert ranking_metrics(PLANS)["chosen_close_frac"] == 0.0


def test_ranking_is_said_where_there_are_plans() -> None:
    tau, chosen = ranking_lines(PLANS)
    assert "Kendall tau 0.33" in tau
    assert "in 0 of 1 cases; a on 2: tp=2 is 14 % slower than pp=2" in chosen
    assert ranking_lines(PLANS[:1]) == [] and ranking_metrics(PLANS[:1]) == {}


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


def test_what_is_left_out_is_said_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object: the rows that no case explains are counted elsewhere."""
    rows = pd.DataFrame({"case": ["gpt-s", "no-such-case"], "plan": ["", ""], "batch": [2, 2]})
    assert list(stated_rows(rows)["case"]) == ["gpt-s"]
    said = capsys.readouterr()
    assert (said.out, "1 rows left out" in said.err) == ("", True)


def test_rows_of_one_case_are_told_apart_by_what_differs() -> None:
    """Measured steps of a user's own have a name each; their model says how they were forecast."""
    one = replace(RESULTS[0], case="gpt", model="gpt a10 bf16", samples=1024, plan="")
    text = StringIO()
    Console(width=120, file=text).print(results_table([one, replace(one, model="gpt a10 fp32")]))
    assert "gpt a10 bf16" in text.getvalue() and "gpt a10 fp32" in text.getvalue()
    assert "1,024" in text.getvalue()
    assert [one.label, replace(one, source="logs").label] == ["gpt a10 bf16", "gpt"]
