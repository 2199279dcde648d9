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
CONDITIONS = {"sm_clock_hz": 1e-6, "power_w": 1.0, "temperature_c": 1.0}  # and scales: MHz


def summary(root: Path, gpu: str) -> list[str]:
    """Lines on rows by family and status, failures, kernel times, retests and clocks."""
    tables = {name: store.read_rows([root], name) for name in (*families(), "iteration")}
    tables = {name: rows[rows["gpu"] == gpu] for name, rows in tables.items() if len(rows)}
    tables = {name: rows for name, rows in tables.items() if len(rows)}
    if not tables:
        return [f"no rows of {gpu}"]
    rows = pd.concat(tables.values(), ignore_index=True)
    counts = pd.crosstab(rows["family"], rows["status"])
    if "cost_s" in rows:
        counts["seconds"] = rows.groupby("family")["cost_s"].sum().round()
    failed = rows[~rows["status"].isin(("ok", "throttled"))]
    reasons = failed["reason"].astype(str).str[:LETTERS]
    failures = (failed["family"] + " " + failed["status"] + ": " + reasons).value_counts()
    conditions = rows.reindex(columns=[*CONDITIONS]).astype(float).mul(pd.Series(CONDITIONS))
    conditions = conditions.rename(columns={"sm_clock_hz": "sm_clock_mhz"})
    throttled = rows["throttle"].dropna().value_counts() if "throttle" in rows else pd.Series()
    return [
        f"{len(rows)} rows of {gpu}",
        *_lines(counts),
        *_lines(failures.head(REASONS)),
        _kernel_times(rows),
        *_retests(tables),
        *_lines(conditions.dropna(axis=1, how="all").quantile([0.1, 0.5, 0.9]).round()),
        *_lines(throttled.head(REASONS)),
    ]


def _lines(table: pd.DataFrame | pd.Series) -> list[str]:
    """A table as indented lines; none of an empty one."""
    return [] if table.empty else [f"  {line}" for line in table.to_string().splitlines()]


def _kernel_times(rows: pd.DataFrame) -> str:
    """A line on how many rows have other times by CUDA events than by the profiler."""
    checked, disagreeing = timing_disagreement(rows)
    if not checked:
        return "times by events and by profiler: no row has both"
    share = 100 * disagreeing / checked
    return f"times by events and by profiler: {disagreeing} of {checked} disagree ({share:.1f} %)"


def _retests(tables: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Lines on the difference between two measurements of a point: |log ratio| in percent."""
    for name, rows in tables.items():
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
