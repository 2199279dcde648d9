"""Whether the first rows of a GPU make sense, before half an hour is spent on more of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from microbench import store
from microbench.hardware.spec import Gpu
from microbench.ops import families
from microbench.ops.family import Family

FASTEST_FRAC = 0.6  # of the roofline's time: below it nothing was computed, or the clock is wrong
BAD_FRAC = 0.5  # of families or of times that do not make sense: more of them are not worth having


class Senseless(Exception):
    """Raised where most of what was measured is wrong: the campaign must not go on."""


def check(root: Path, gpu: Gpu, expected: tuple[str, ...]) -> list[str]:
    """What is wrong with the rows, a line each; Senseless where that is most of it.

    Every family expected has a row that is ok, times are positive, and none is far below what the
    GPU's peaks allow: arithmetic for all rows, memory for those with a cold cache.
    """
    wrong, empty, checked, impossible = [], 0, 0, 0
    for name in expected:
        rows = store.read_rows([root], name)
        rows = rows[rows["gpu"] == gpu.name] if len(rows) else rows
        good = rows[rows["status"].isin(("ok", "throttled"))] if len(rows) else rows
        if good.empty:
            empty += 1
            wrong.append(f"{name}: none of {len(rows)} rows is ok")
            continue
        try:
            least_us = FASTEST_FRAC * bound_us(families()[name], good, gpu)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            wrong.append(f"{name}: no bound of its rows ({type(exc).__name__}: {exc})")
            continue
        time_us = good["time_us"].to_numpy(float)
        bad = ~(time_us > 0) | (time_us < least_us)
        checked, impossible = checked + len(good), impossible + int(bad.sum())
        if bad.any():
            at = int(np.argmax(bad))
            op, cache, us = good["op"].iloc[at], good["cache"].iloc[at], time_us[at]
            bound = f"{us:.3g} us where {least_us[at] / FASTEST_FRAC:.3g} are the least"
            wrong.append(f"{name}: {bad.sum()} of {len(good)} times, e.g. {op} {cache}: {bound}")
    if empty > BAD_FRAC * len(expected) or impossible > BAD_FRAC * max(checked, 1):
        raise Senseless("; ".join(wrong))
    return wrong


def bound_us(family: Family, rows: pd.DataFrame, gpu: Gpu) -> np.ndarray:
    """Least time of each row at the GPU's peaks; 0 where the family has another bound."""
    bound = np.zeros(len(rows))
    if family.floor_us is not None or family.name == "host":
        return bound
    columns = SimpleNamespace(**{n: rows[n].to_numpy() for n in rows.columns})
    ordinary = rows["load"].isna().to_numpy() if "load" in rows else np.full(len(rows), True)
    peaks = np.array([gpu.peak(str(dtype)) for dtype in rows["dtype"]])
    bound[:] = np.asarray(family.flops(columns), float) / peaks * 1e6
    memory_us = np.asarray(family.bytes_moved(columns), float) / gpu.hbm_bytes_per_s * 1e6
    cold = (rows["cache"] == "cold").to_numpy()
    return np.where(
        ordinary & np.isfinite(bound), np.where(cold, np.fmax(bound, memory_us), bound), 0
    )
