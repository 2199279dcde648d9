"""Sections about ops on held-out rows: forecasts, errors by group, other learners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from itercast.eval.learner_table import BEST_RANK
from itercast.eval.report import charts
from itercast.eval.report.blocks import Device, Section, Table, number
from itercast.eval.report.op_errors import Group, by_condition, by_family
from itercast.learners.models.compared import BLEND
from itercast.learners.train import errors
from itercast.microbench.store import Facts

OURS = "itercast"  # what the blend is called here


def times(ops: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured times in us."""
    return ops["predicted_us"].to_numpy(), ops["measured_us"].to_numpy()


def ops_section(ops: pd.DataFrame) -> Section:
    """Predicted against measured ops."""
    total = errors(*times(ops))
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
        charts=[charts.ops(ops)],
    )


def _group_table(found: Sequence[Group], first: str, labels: Sequence[str]) -> Table:
    head = [first, "rows", "median %", "p90 %", "bias %", "retest %"]
    rows = [
        [
            label,
            str(g.rows),
            number(g.median_ape_pct),
            number(g.p90_ape_pct),
            number(g.bias_pct, sign=True),
            number(g.retest_ape_pct),
        ]
        for label, g in zip(labels, found, strict=True)
    ]
    return Table(head=head, rows=rows)


def family_section(device: Device) -> Section:
    """Errors by op family."""
    found = by_family(device.ops, device.fit)
    names = [g.name for g in found]
    first = found[0]
    return Section(
        anchor="families",
        title="Error by op family",
        text=[
            f"Largest: {first.name}, median {first.median_ape_pct:.1f} % on {first.rows} rows. "
            "Where the median is near the noise floor, no other model can do much better."
        ],
        charts=[charts.groups("Error by op family", found, names)],
        table=_group_table(found, "family", names),
    )


def condition_section(ops: pd.DataFrame) -> Section:
    """Errors by size, dtype, GPU, threads and cache."""
    found = by_condition(ops)
    labels = [f"{g.dimension}: {g.name}" for g in found]
    return Section(
        anchor="conditions",
        title="Error by size, dtype, GPU and conditions",
        text=["Sizes are the bytes that an op reads and writes at least."],
        charts=[charts.groups("Error by size, dtype, GPU and conditions", found, labels)],
        table=_group_table(found, "rows of", labels),
    )


def learner_section(fit: Facts) -> Section:
    """Our models beside other learners on the same rows."""
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
        charts=[charts.dots("Median error by learner", order, medians, "median error, %")],
        table=Table(head=head, rows=rows),
    )
