"""Warnings about groups of iterations that are off by more than chance, on cases made by hand."""

from dataclasses import replace

import pytest
from report_facts import case

from itercast.eval.results import KINDS, ONE_PROCESS, CaseResult, grouped, kind_of, totals
from itercast.eval.systematic import systematic_errors


def cases(
    errors_pct: list[float], plan: str = "", retest_pct: float = 1.0, **parts: float
) -> list[CaseResult]:
    """Iterations of 1000 us whose forecasts are off by so much, with intervals of 10 %."""
    made = [case(f"m{i}", 1000 + 10 * e, 1000, **parts) for i, e in enumerate(errors_pct)]
    ranks = 2 if "dp=2" in plan or "tp=2" in plan else 1
    return [replace(r, plan=plan, ranks=ranks, retest_ape_pct=retest_pct) for r in made]


GOOD = [2.0, -1.0, 3.0, -2.0, 1.0, -3.0, 2.0, -1.0]


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("", ONE_PROCESS),
        ("accumulate=2", "one process with a plan"),
        ("dp=2", "DDP"),
        ("dp=2,zero=3", "ZeRO and FSDP"),
        ("tp=2", "tensor parallel"),
        ("cp=2", "context parallel"),
        ("pp=2,micro=4", "pipeline"),
        ("dp=2,tp=2", "several axes"),
    ],
)
def test_every_plan_is_of_one_kind(plan: str, kind: str) -> None:
    assert kind_of(plan) == kind and kind in KINDS


def test_all_plans_are_summed_up_where_there_are_several_kinds() -> None:
    results = [*cases(GOOD), *cases(GOOD, "dp=2"), *cases(GOOD, "tp=2")]
    assert list(grouped(results)) == [ONE_PROCESS, "DDP", "tensor parallel"]
    assert len(totals(results)["all plans"]) == 16
    assert "all plans" not in totals([*cases(GOOD), *cases(GOOD, "dp=2")])


def test_each_gpu_is_summed_up_on_its_own() -> None:
    """README states an error for each; pooled, the one with more cases would speak for both."""
    twin = [replace(one, gpu="twin") for one in cases(GOOD)]
    (gpu,) = {one.gpu for one in cases(GOOD)}
    found = totals([*cases(GOOD), *twin])
    assert {name: len(group) for name, group in found.items()} == {
        f"{ONE_PROCESS} on {gpu}": 8,
        f"{ONE_PROCESS} on twin": 8,
    }


def test_good_forecasts_are_not_warned_of() -> None:
    """Errors of both signs inside their intervals; five of one sign happen by chance (1 in 16)."""
    assert systematic_errors(cases(GOOD)) == []
    assert systematic_errors(cases([-8.0] * 5)) == []
    assert systematic_errors(cases([-3.0] * 30)) == []  # too small to change a decision


def test_eight_forecasts_that_are_all_too_short_are() -> None:
    """By -15 to -22 %, outside of intervals of 10 %; the same models alone are right."""
    errors = [-15.0, -16.0, -17.0, -18.0, -20.0, -21.0, -22.0, -22.0]
    (found,) = systematic_errors([*cases(GOOD), *cases(errors, "dp=2")])
    assert (found.group, found.bias_pct, found.coverage_pct) == ("DDP", pytest.approx(-19), 0)
    assert found.text.startswith(
        "DDP: all 8 forecasts are too short, by 19 % (median); the intervals of 80 % hold only "
        "0 of 8 measurements. Likely cause: what the plan adds (messages, copies, waiting)"
    )
    (alone,) = systematic_errors([*cases(GOOD), *cases(errors, "accumulate=2")])
    assert "what the plan adds (sums of gradients, ops done again)" in alone.text


def test_intervals_that_miss_are_said_of_few_cases_too() -> None:
    """Two of two outside 80 %: 0.2 * 0.2 = 0.04; errors of both signs are no bias."""
    (found,) = systematic_errors(cases([30.0, -30.0]))
    assert "too" not in found.text.split(".")[0] and "hold only 0 of 2" in found.text


def test_the_cause_is_the_part_that_the_error_follows() -> None:
    """The host's share goes from 10 to 80 % and it takes half as long again; kernels are right."""
    shares = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    some = [
        replace(
            case(f"m{i}", 1000, 1000 + 500 * h, host=1000 * h, kernels=1000 * (1 - h)),
            retest_ape_pct=0.0,
        )
        for i, h in enumerate(shares)
    ]
    (found,) = systematic_errors(some)
    assert "Likely cause: host (+" in found.text and "the host is another one" in found.text


def test_noise_of_a_busy_machine_explains_forecasts_that_are_too_short_alone() -> None:
    (short,) = systematic_errors(cases([-20.0] * 8, retest_pct=60.0))
    (long,) = systematic_errors(cases([20.0] * 8, retest_pct=60.0))
    assert "busy with other work" in short.text and "busy with" not in long.text


def test_each_gpu_is_judged_by_itself() -> None:
    """Right on one and too long on another is no small error of both."""
    other = [replace(r, gpu="other") for r in cases([15.0] * 8)]
    (found,) = systematic_errors([*cases(GOOD * 3), *other])
    assert found.text.startswith("One process on other: all 8 forecasts are too long")
