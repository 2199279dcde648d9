"""Summary of the rows of a campaign, for the end of its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.microbench import store
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.ops import families
from itercast.microbench.timing.kernels import timing_disagreement

REASONS = 12  # the most frequent reasons of failures
LETTERS = 90  # of a reason


def summary(root: Path, gpu: str) -> list[str]:
    """Lines on rows by family and status, failures, kernel times, retests and clocks."""
    found = {n: store.read_rows([root], n) for n in (*families(), "iteration")}
    found = {n: rows[rows["gpu"] == gpu] for n, rows in found.items() if len(rows)}
    found = {n: rows for n, rows in found.items() if len(rows)}
    if not found:
        return [f"no rows of {gpu}"]
    rows = pd.concat(found.values(), ignore_index=True)
    return [
        f"{len(rows)} rows of {gpu}",
        *_by_status(rows),
        *_failures(rows),
        _kernel_times(rows),
        *_retests(found),
        *_conditions(rows),
    ]


def _by_status(every: pd.DataFrame) -> Iterator[str]:
    for name, rows in every.groupby("family"):
        counts = ", ".join(f"{n} {s}" for s, n in rows["status"].value_counts().items())
        cost = f", {rows['cost_s'].sum():.0f} s" if "cost_s" in rows else ""
        yield f"  {name}: {counts}{cost}"


def _failures(every: pd.DataFrame) -> Iterator[str]:
    failed = every[~every["status"].isin(("ok", "throttled"))]
    reasons = failed["reason"].astype(str).str[:LETTERS]
    what = failed["family"] + " " + failed["status"] + ": " + reasons
    for line, number in what.value_counts().head(REASONS).items():
        yield f"  {number} x {line}"


def _kernel_times(every: pd.DataFrame) -> str:
    checked, disagreeing = timing_disagreement(every)
    if not checked:
        return "times by events and by profiler: no row has both"
    share = 100 * disagreeing / checked
    return f"times by events and by profiler: {disagreeing} of {checked} disagree ({share:.1f} %)"


def _retests(found: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Lines on the difference between two measurements of a point: |log ratio| in percent."""
    for name, rows in found.items():
        params = Iteration if name == "iteration" else families()[name].params
        keys = [f.name for f in fields(params) if f.name in rows]
        keys += [n for n in ("cache", "ranks_per_node") if n in rows and n not in keys]
        good = rows[rows["status"] == "ok"]
        if good.empty:
            continue
        first, second = (
            good[good["repeat"] == n].groupby(keys, dropna=False)["time_us"].median()
            for n in (0, 1)
        )
        pairs = pd.concat([first, second], axis=1, keys=["first", "second"]).dropna()
        if len(pairs):
            apart = 100 * np.abs(np.log((pairs["second"] / pairs["first"]).to_numpy(float)))
            middle, high = np.quantile(apart, [0.5, 0.9])
            yield f"  {name}: {len(pairs)} retests, median {middle:.1f} % apart, p90 {high:.1f} %"


def _conditions(every: pd.DataFrame) -> Iterator[str]:
    for name, unit, scale in (
        ("sm_clock_hz", "MHz", 1e-6),
        ("power_w", "W", 1.0),
        ("temperature_c", "C", 1.0),
    ):
        if name in every and every[name].notna().any():
            low, middle, high = (every[name] * scale).quantile([0.1, 0.5, 0.9])
            yield f"  {name}: p10 {low:.0f}, median {middle:.0f}, p90 {high:.0f} {unit}"
    if "throttle" in every:
        counts = every["throttle"].dropna().value_counts().head(6)
        yield "  throttle: " + ", ".join(f"{reason or 'none'} {n}" for reason, n in counts.items())
