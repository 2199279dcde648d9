"""GPUs whose products were not measured, but of which is known what large products reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from learners.lenders import Asked
from learners.table import LAUNCH_FLOOR_US, bounds_us, columns
from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

Price = Callable[[pd.DataFrame], np.ndarray]


def correction(
    rows: pd.DataFrame, family: Family, asked: Asked, unmeasured: np.ndarray, price: Price
) -> np.ndarray:
    """Factors that bring the large op of each GPU and dtype that is ``unmeasured`` to its rate.

    Of other ops, a power of that factor: the share of computing in their bounds, over that of the
    large op. Other rows have 1.
    ``price`` forecasts rows in us without this correction.
    """
    found = np.ones(len(rows))
    if family.large is None or not unmeasured.any():
        return found
    where = np.flatnonzero(unmeasured)
    dtype = columns(rows.iloc[where], family).dtype
    whose = pd.MultiIndex.from_arrays([asked.gpu[where], dtype])
    codes, distinct = pd.factorize(whose)
    for code, (name, of) in enumerate(distinct):
        gpu = asked.gpus[name]
        if of in gpu.reached_flops_per_s:
            mine = where[codes == code]
            large, known_us = _large(family, gpu, of)
            share = _computing(rows.iloc[mine], family, gpu) / _computing(large, family, gpu)
            found[mine] = (known_us / price(large)) ** np.minimum(share, 1.0)
    return found


def _large(family: Family, gpu: Gpu, dtype: str) -> tuple[pd.DataFrame, float]:
    """The row of the large op, and its known time in us."""
    assert family.large is not None
    large = family.large(dtype)
    row = pd.DataFrame([{"family": family.name, "gpu": gpu.name, **asdict(large)}])
    return row, 1e6 * float(family.flops(large)) / gpu.reached_flops_per_s[dtype]


def _computing(rows: pd.DataFrame, family: Family, gpu: Gpu) -> Any:
    """Share of computing in the sum of each row's bounds: computing, memory, launch."""
    compute_us, memory_us = bounds_us(family, columns(rows, family), gpu, 0)
    return compute_us / (compute_us + memory_us + LAUNCH_FLOOR_US[gpu.kind])
