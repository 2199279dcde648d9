"""Sections about ops on held-out rows: forecasts, errors by group, other learners."""

from __future__ import annotations

import pandas as pd

from itercast.eval.learner_ranking import BEST_RANK
from itercast.eval.results import RETEST
from itercast.extras.pages import charts
from itercast.extras.pages.blocks import Device, Section, Table, number
from itercast.extras.pages.op_errors import Groups, by_condition, by_family, scores
from itercast.extras.software_ranking import SOFTWARE, software_metrics
from itercast.learners.models.compared import BLEND
from itercast.microbench.store import Facts

OURS = "itercast"  # what the blend is called here


def ops_section(ops: pd.DataFrame) -> Section:
    """Predicted against measured ops."""
    total = scores(ops)
    text = (
        f"{len(ops)} measurements of shapes that training did not see: median error "
        f"{total['median_ape_pct']:.1f} %, mean {total['mape_pct']:.1f} %, p90 "
        f"{total['p90_ape_pct']:.1f} %, bias {total['bias_pct']:+.1f} %."
    )
    shown = min(len(ops), charts.MOST_POINTS)
    more = f"The chart shows {shown} of them, the worst among them." if shown < len(ops) else ""
    return Section(
        anchor="ops",
        title="Predicted against measured ops",
        text=[f"{text} {more}".strip()],
        chart=charts.ops(ops),
    )


def _group_section(anchor: str, title: str, text: str, heading: str, errors: Groups) -> Section:
    """A section with a chart and a table of errors; ``heading``: of the column of group names."""
    columns = {"median %": "median_ape_pct", "p90 %": "p90_ape_pct", "retest %": RETEST}
    rows = [
        [
            name,
            str(group["rows"]),
            *(number(group.get(column)) for column in columns.values()),
            number(group["bias_pct"], sign=True),
        ]
        for name, group in errors.items()
    ]
    return Section(
        anchor=anchor,
        title=title,
        text=[text],
        chart=charts.groups(errors),
        table=Table(head=[heading, "rows", *columns, "bias %"], rows=rows),
    )


def family_section(device: Device) -> Section:
    """Errors by op family."""
    errors = by_family(device.ops, device.fit)
    name, largest = next(iter(errors.items()))
    text = (
        f"Largest: {name}, median {largest['median_ape_pct']:.1f} % on {largest['rows']} rows. "
        "Where the median is near the noise floor, no other model can do much better."
    )
    return _group_section("families", "Error by op family", text, "family", errors)


def condition_section(ops: pd.DataFrame) -> Section:
    """Errors by size, dtype, GPU, threads and cache."""
    title = "Error by size, dtype, GPU and conditions"
    text = "Sizes are the bytes that an op reads and writes at least."
    return _group_section("conditions", title, text, "rows of", by_condition(ops))


def software_sections(ops: pd.DataFrame) -> list[Section]:
    """How often the fastest stack for a call is found; none where no call was timed under two."""
    names = [n for n in ("op", "gpu", "dtype", "params", "threads", "cache") if n in ops]
    rows = []
    for family, some in ops.groupby("family") if "stack" in ops else ():
        call = some.groupby(names, dropna=False).ngroup().to_numpy()
        stack, guess, measured = (
            some[name].to_numpy() for name in ("stack", "predicted_us", "measured_us")
        )
        if found := software_metrics(call, stack, guess, measured, 2):
            cells = [number(found[metric]) for metric in SOFTWARE]
            rows.append([str(family), f"{found['calls']:.0f}", *cells])
    if not rows:
        return []
    head = ["family", "calls", "top-1 %", "top-3 %", "pairs in order %", "slower than best %"]
    return [
        Section(
            anchor="software",
            title="Fastest software",
            text=["Calls timed under several stacks; the choice is the one of the shortest time."],
            table=Table(head=head, rows=rows),
        )
    ]


def learner_section(fit: Facts) -> Section:
    """Our models' errors beside other learners', on the same rows."""
    order = sorted(fit, key=lambda name: -fit[name]["learners"][BLEND]["median_ape_pct"])
    learners = dict.fromkeys(learner for entry in fit.values() for learner in entry["learners"])
    medians = {
        OURS if learner == BLEND else learner: [
            fit[name]["learners"].get(learner, {}).get("median_ape_pct") for name in order
        ]
        for learner in learners
    }
    ahead = sum(fit[name]["learners"][BLEND].get("rank") == BEST_RANK for name in order)
    head = ["family", "rows", "retest %", "80 % intervals cover %", *medians]
    rows = [
        [
            name,
            str(fit[name]["rows"]),
            number(fit[name]["retest_ape_pct"]),
            number(fit[name]["coverage_pct"], 0),
            *(number(values[i]) for values in medians.values()),
        ]
        for i, name in enumerate(order)
    ]
    return Section(
        anchor="learners",
        title="Against other learners",
        text=[f"In {ahead} of {len(order)} families no learner beats {OURS} beyond the noise."],
        chart=charts.dots(order, medians, "median error, %"),
        table=Table(head=head, rows=rows),
    )
