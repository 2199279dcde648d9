"""Sections about whole iterations: forecasts beside measurements, where the error sits."""

from __future__ import annotations

from collections.abc import Sequence

from itercast.eval.errors.error_parts import error_parts, factors
from itercast.eval.iteration_parts import PARTS
from itercast.eval.ranking import ranking_lines
from itercast.eval.report import charts
from itercast.eval.report.blocks import Section, Table, number
from itercast.eval.results import COLUMNS, COVERAGE, CaseResult, summary, totals


def iteration_section(results: Sequence[CaseResult]) -> Section:
    """Predicted against measured iterations."""
    head = ["case", "predicted ms", "80 % interval", "measured ms", "error %", "retest %"]
    rows = []
    for r in results:
        predicted, *others = r.cells
        interval = f"{r.predicted_us_p10 / 1e3:.2f} to {r.predicted_us_p90 / 1e3:.2f}"
        rows.append([r.label, predicted, interval, *others])
    return Section(
        anchor="iterations",
        title="Predicted against measured iterations",
        text=[f"{line[0].upper()}{line[1:]}." for line in ranking_lines(results)],
        chart=charts.iterations(results),
        table=Table(head=[*head, "no model %"], rows=rows),
    )


def kind_section(results: Sequence[CaseResult]) -> Section:
    """Errors of iterations by kind of plan."""
    rows = []
    for name, group in totals(results).items():
        found = summary(group)
        errors = [number(found.get(key), sign=key == "bias_pct") for key in COLUMNS.values()]
        rows.append([name, str(len(group)), *errors, number(found[COVERAGE], 0)])
    return Section(
        anchor="kinds",
        title="Error of iterations by kind of plan",
        text=[
            "Absolute errors in %; bias is the mean of signed errors, below 0 where forecasts are "
            "too short. Retest is the median difference of two measurements of one iteration."
        ],
        table=Table(head=["kind", "cases", *COLUMNS, "80 % intervals cover %"], rows=rows),
        folded=False,
    )


def waterfall_section(results: Sequence[CaseResult]) -> Section:
    """Which parts of the forecast the error sits in."""
    factor = factors(results)
    chosen = {"all cases": results, **totals(results), **{r.label: [r] for r in results}}
    found = [error_parts(some, name, factor) for name, some in chosen.items()]
    whole = found[0]
    total = 100 - sum(whole.forecast.values())
    largest = max(PARTS, key=lambda p: abs(whole.correction[p]))
    text = [
        "The upper bars add up to the forecast of the slowest rank: kernels that a model prices; "
        "the host; messages that no compute hides; synchronisation (pipeline bubble, waiting for "
        "slower stages); time that rests on assumed numbers; ops that no model covers. The lower "
        "bars are the error: what each part would have to be longer or shorter by. They are "
        "estimated from all cases at once (ridge regression), not measured part by part.",
        f"On average forecasts are {abs(total):.1f} % of the iteration too "
        f"{'short' if total > 0 else 'long'}; most of it is put down to {largest} "
        f"({whole.correction[largest]:+.1f} %).",
    ]
    used = [p for p in PARTS if any(one.forecast[p] for one in found)]
    rows = [
        [
            one.name,
            *(number(one.forecast[p]) for p in used),
            *(number(one.correction[p], sign=True) for p in used),
            number(one.unexplained, sign=True),
        ]
        for one in found
    ]
    head = ["% of measured", *used, *(f"error of {p}" for p in used), "not attributed"]
    return Section(
        anchor="waterfall",
        title="Where the error of iterations sits",
        text=text,
        chart=charts.waterfall(found),
        table=Table(head=head, rows=rows),
    )
