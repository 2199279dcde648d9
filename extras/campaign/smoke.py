"""Checks that the first rows of a GPU are plausible, before half an hour is spent on more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from itercast.microbench import store
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family

MIN_ROOFLINE_FRAC = 0.6  # of the roofline's time; shorter times are implausible
MAX_BAD_FRAC = 0.5  # of families without rows, or of implausible times


class ImplausibleRows(Exception):
    """Raised where more than half of the rows are implausible; ends the campaign."""


def check(root: Path, gpu: Gpu, expected: tuple[str, ...]) -> list[str]:
    """Describe what is wrong with the rows, one line each; ImplausibleRows if more than half is.

    Every expected family has an ok row; times are positive, and at least 0.6 of the time at the
    GPU's peaks: of arithmetic for all rows, of memory also for rows with a cold cache.
    """
    wrong, empty, checked, impossible = [], 0, 0, 0
    for name in expected:
        rows = store.read_rows([root], name)
        rows = rows[rows["gpu"] == gpu.name] if len(rows) else rows
        timed = rows[rows["status"].isin(("ok", "throttled"))] if len(rows) else rows
        if timed.empty:
            empty += 1
            wrong.append(f"{name}: none of {len(rows)} rows is ok")
            continue
        try:
            least_us = MIN_ROOFLINE_FRAC * bound_us(families()[name], timed, gpu)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            wrong.append(f"{name}: no roofline for its rows ({type(exc).__name__}: {exc})")
            continue
        time_us = timed["time_us"].to_numpy(float)
        bad = ~(time_us > 0) | (time_us < least_us)
        checked, impossible = checked + len(timed), impossible + int(bad.sum())
        if bad.any():
            first = int(np.argmax(bad))
            row, roofline_us = timed.iloc[first], least_us[first] / MIN_ROOFLINE_FRAC
            example = f"{row['op']} {row['cache']}: {time_us[first]:.3g} us"
            count = f"{bad.sum()} of {len(timed)} times are implausible"
            wrong.append(f"{name}: {count}, e.g. {example}, roofline {roofline_us:.3g} us")
    if empty > MAX_BAD_FRAC * len(expected) or impossible > MAX_BAD_FRAC * max(checked, 1):
        raise ImplausibleRows("; ".join(wrong))
    return wrong


def bound_us(family: Family, rows: pd.DataFrame, gpu: Gpu) -> np.ndarray:
    """Least time of each row in us: compute at its peak, of cold rows memory traffic if longer.

    0 for families with a bound of their own.
    """
    if family.floor_us is not None or family.on_host:
        return np.zeros(len(rows))
    columns = SimpleNamespace(**{n: rows[n].to_numpy() for n in rows.columns})
    peaks = np.array([gpu.peak(str(dtype)) for dtype in rows["dtype"]])
    compute_us = np.asarray(family.flops(columns), float) / peaks * 1e6
    memory_us = np.asarray(family.bytes_moved(columns), float) / gpu.hbm_bytes_per_s * 1e6
    cold = (rows["cache"] == "cold").to_numpy()
    roofline_us = np.where(cold, np.fmax(compute_us, memory_us), compute_us)
    return np.where(np.isfinite(compute_us), roofline_us, 0)
