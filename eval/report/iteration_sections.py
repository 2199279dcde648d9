"""Sections about whole iterations: forecasts beside measurements, where the error sits."""

from __future__ import annotations

from collections.abc import Sequence

from itercast.eval.iteration_parts import PARTS
from itercast.eval.ranking import ranking_lines
from itercast.eval.report import charts
from itercast.eval.report.blocks import Section, Table, number
from itercast.eval.report.error_parts import error_parts, factors
from itercast.eval.results import CaseResult, grouped, in_words


def iteration_section(results: Sequence[CaseResult]) -> Section:
    """Predicted against measured iterations."""
    text = [
        f"{name.capitalize()}, {len(group)} cases: {in_words(group)}."
        for name, group in grouped(results).items()
    ]
    head = ["case", "predicted ms", "80 % interval", "measured ms", "error %", "retest %"]
    rows = []
    for r in results:
        predicted, *others = r.cells
        interval = f"{r.predicted_us_p10 / 1e3:.2f} to {r.predicted_us_p90 / 1e3:.2f}"
        rows.append([r.label, predicted, interval, *others])
    return Section(
        anchor="iterations",
        title="Predicted against measured iterations",
        text=[*text, *(f"{line}." for line in ranking_lines(results))],
        chart=charts.iterations(results),
        table=Table(head=[*head, "no model %"], rows=rows),
    )


def waterfall_section(results: Sequence[CaseResult]) -> Section:
    """Which parts of the forecast the error sits in."""
    factor = factors(results)
    chosen = {"all cases": results, **grouped(results), **{r.label: [r] for r in results}}
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
