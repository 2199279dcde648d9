"""All of a device's page: headline numbers, then sections in the order they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from itercast.eval.error_parts import error_parts, factors
from itercast.eval.intervals import LEVELS, at_stated, coverage_pct
from itercast.eval.iteration_parts import PARTS
from itercast.eval.ranking import ranking_lines
from itercast.eval.results import (
    COLUMNS,
    COVERAGE,
    RETEST,
    CaseResult,
    grouped,
    records,
    summary,
    totals,
)
from itercast.eval.systematic import systematic_errors
from itercast.eval.tables import three_digits
from itercast.extras.pages import charts
from itercast.extras.pages.blocks import Device, Section, Table, Tile, number
from itercast.extras.pages.op_errors import scores, worst
from itercast.extras.pages.op_sections import (
    condition_section,
    family_section,
    learner_section,
    ops_section,
    software_sections,
)

WORST = 10
UNSURE_FRAC = 0.1  # of an iteration that no model covers, or that is assumed, is a reason
RETRAIN = (
    "no forecasts of held-out rows are on disk; `itercast train` and `itercast demo` keep them"
)


def tiles(device: Device) -> list[Tile]:
    """The headline numbers."""
    found, off = [], {w.group for w in systematic_errors(device.results)}
    for name, group in grouped(device.results).items():
        total = summary(group)
        beside = (
            f"geometric mean of {len(group)} cases, bias {total['bias_pct']:+.0f} %; "
            f"{retests(total.get(RETEST))}; 80 % intervals cover {total[COVERAGE]:.0f} %"
        )
        value = f"{total['geomean_ape_pct']:.1f} %"
        label = f"Iterations, {name}"
        found.append(Tile(label=label, value=value, beside=beside, off=name in off))
    if len(device.ops):
        total = scores(device.ops)
        beside = f"median of {len(device.ops)} held-out rows; {retests(total.get(RETEST))}"
        if covered := _covered(device).get("ops"):
            beside += f"; 80 % intervals cover {at_stated(covered):.0f} %"
        found.append(Tile(label="Ops", value=f"{total['median_ape_pct']:.1f} %", beside=beside))
    return found


def retests(floor_pct: float | None) -> str:
    """The noise floor in words."""
    return "nothing measured twice" if floor_pct is None else f"retests differ by {floor_pct:.1f} %"


def sections(device: Device) -> list[Section]:
    """All sections, in the order in which they are read."""
    found = []
    if device.results:
        makers = (iteration_section, kind_section, waterfall_section)
        found += [make(device.results) for make in makers]
    if len(device.ops):
        found += [ops_section(device.ops), family_section(device), condition_section(device.ops)]
        found += software_sections(device.ops)
    else:
        found.append(Section(anchor="ops", title="Ops", text=[f"Nothing to show: {RETRAIN}."]))
    if device.fit:
        found.append(learner_section(device.fit))
    found += [calibration_section(device)] if _covered(device) else []
    return [*found, worst_section(device)]


def _covered(device: Device) -> dict[str, list[float]]:
    """Coverage in % by level, of iterations and of ops."""
    found = {}
    if device.results:
        times = np.array(
            [
                (r.measured_us, r.predicted_us, r.predicted_us_p10, r.predicted_us_p90)
                for r in device.results
            ]
        )
        found["iterations"] = coverage_pct(*times.T)
    if len(device.ops) and "predicted_us_p10" in device.ops:
        names = ["measured_us", "predicted_us", "predicted_us_p10", "predicted_us_p90"]
        found["ops"] = coverage_pct(*device.ops[names].to_numpy().T)
    return found


def calibration_section(device: Device) -> Section:
    """Nominal level of intervals against how many measurements they cover."""
    covered = _covered(device)
    said = " and ".join(f"{at_stated(pct):.0f} % of {name}" for name, pct in covered.items())
    rows = [
        [f"{100 * level:.0f}", *(number(pct[i]) for pct in covered.values())]
        for i, level in enumerate(LEVELS)
    ]
    return Section(
        anchor="calibration",
        title="Calibration of the intervals",
        text=[
            f"Intervals of 80 % cover {said}. Below the diagonal intervals are too narrow, above "
            "it too wide. Other levels stretch the stated interval as a normal distribution in log "
            "time would."
        ],
        chart=charts.calibration(covered),
        table=Table(head=["nominal %", *(f"{name} covered %" for name in covered)], rows=rows),
    )


def worst_section(device: Device) -> Section:
    """The ten worst forecasts of ops and of iterations, with a reason each."""
    rows: list[list[str]] = []
    if len(device.ops):
        for row in records(worst(device.ops, WORST)):
            what = f"{row['family']} {row['op']} {row['dtype']} {row['params']}"
            times = [milliseconds(row[c]) for c in ("predicted_us", "measured_us")]
            rows.append([what, *times, f"{row['error_pct']:+.0f}", row["reason"]])
    by_error = sorted(device.results, key=lambda r: -abs(r.error_pct))[:WORST]
    for r in by_error:
        times = [milliseconds(us) for us in (r.predicted_us, r.measured_us)]
        rows.append([f"iteration {r.label}", *times, f"{r.error_pct:+.0f}", case_reason(r)])
    return Section(
        anchor="worst",
        title="The worst forecasts",
        text=[
            f"The {WORST} worst ops and the {WORST} worst iterations. Out of envelope: a feature "
            "lies beyond the rows learned from. No similar size: the nearest that was measured is "
            "more than four times as large or small; a doubling is a factor of two. Noisy "
            "measurement: it scatters by half of the error or more."
        ],
        table=Table(
            head=["what", "predicted ms", "measured ms", "error %", "reason"],
            rows=rows,
            wide=(0, 4),
        ),
        folded=False,
    )


def milliseconds(time_us: float) -> str:
    """A time in ms with three digits."""
    return three_digits(time_us / 1e3)


def case_reason(r: CaseResult) -> str:
    """Why the forecast of an iteration may be off."""
    found = []
    for part, why in (("uncovered", "no model covers"), ("assumed", "assumed numbers decide")):
        frac = r.parts_us.get(part, 0.0) / r.predicted_us
        if frac >= UNSURE_FRAC:
            found.append(f"{why} {100 * frac:.0f} % of it")
    if r.retest_ape_pct is not None and r.retest_ape_pct >= abs(r.error_pct) / 2:
        found.append(f"noisy measurement: two rounds differ by {r.retest_ape_pct:.0f} %")
    if not r.predicted_us_p10 <= r.measured_us <= r.predicted_us_p90:
        found.append("outside its 80 % interval")
    return "; ".join(found) or "none of these: inside its 80 % interval"


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
            "too short. Retest is the median difference of two measurements of one iteration, or "
            "of the halves of several."
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
