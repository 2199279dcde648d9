"""Corrects forecasts of matrix products by rates that hardware files state of their GPUs.

``achieved_flops_per_s`` is what large products achieve, of use where a GPU has no rows;
``full_rate_flops_per_s`` what tensor cores could do without the limit that some cards put on them.
"""

from __future__ import annotations

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.capture.base.switches import is_on
from itercast.learners.features.table import (
    LAUNCH_FLOOR_US,
    bounds_us,
    columns,
    least_us,
)
from itercast.learners.transfer.query_rows import EQUAL_SPEED_DTYPE, QueryRows, RowGroup
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.hardware.spec import Gpu

SAME_SLOWDOWN = assumed(__file__, "same_slowdown")  # dtypes without a stated rate


def bounded_us(time_us: np.ndarray, query: QueryRows) -> np.ndarray:
    """Times, at least what computing takes at the peak (``least_us``)."""
    if not is_on("peak_rate"):
        return time_us
    return np.asarray(np.maximum(time_us, least_us(query.rows, query.family, query.gpus)))


def correction(query: QueryRows, source_gpus: SourceGpus) -> np.ndarray:
    """Factors on forecasts in dtypes without rows on their GPU; 1 where there are such rows.

    A forecast is a multiple, learned on source GPUs, of a roofline at the GPU's peak. Large
    products reach a share of the peak that differs by GPU, so that computing takes ``slower`` times
    as long as that multiple says (``_slower``), and moving data as long:

        factor = (max(slower * compute, memory) + launch floor)
                 / (max(compute, memory) + launch floor)
    """
    factors, family = np.ones(len(query.gpu)), query.family
    unmeasured = source_gpus.unseen_dtype(query) | query.stood_in
    if not (is_on("achieved_rate") and family.at_achieved_rate and unmeasured.any()):
        return factors
    own_dtype = columns(query.rows, family).dtype
    for rows, group in query.groups:
        for dtype in pd.unique(own_dtype[rows[unmeasured[rows]]]):
            slowed, gpu = rows[unmeasured[rows] & (own_dtype[rows] == dtype)], query.gpus[group.gpu]
            slower = _slower(gpu, str(dtype), group, query, source_gpus)
            points, floor_us = columns(query.rows.iloc[slowed], family), LAUNCH_FLOOR_US[gpu.kind]
            compute_us, memory_us = bounds_us(family, points, gpu, 0)
            slow_us = np.maximum(slower * compute_us, memory_us) + floor_us
            factors[slowed] = slow_us / (np.maximum(compute_us, memory_us) + floor_us)
    return factors


def _slower(
    gpu: Gpu, dtype: str, group: RowGroup, query: QueryRows, source_gpus: SourceGpus
) -> float:
    """``_slowdown`` of a GPU over that of its source GPUs (their weighted geometric mean).

    1 where either is not stated, or the GPU has rows in another dtype and states no rate of this.
    """
    measured, as_fast_dtype = source_gpus.measured, EQUAL_SPEED_DTYPE.get(dtype, dtype)
    source_dtype = dtype if as_fast_dtype == group.dtype else group.dtype
    weights = source_gpus.weights(group, gpu, query.family)
    if group.dtype in measured.get(gpu.name, {}):
        weights = {(gpu.name, ""): 1.0}
    slowdowns = {source: _slowdown(query.gpus[source[0]], source_dtype) for source in weights}
    stated = [source for source, slowdown in slowdowns.items() if slowdown]
    own = _slowdown(gpu, dtype)
    if not (own and stated) or (gpu.name in measured and dtype not in gpu.achieved_flops_per_s):
        return 1.0
    logs = [np.log(slowdowns[source]) for source in stated]
    return own / float(np.exp(np.average(logs, weights=[weights[source] for source in stated])))


def _slowdown(gpu: Gpu, dtype: str) -> float:
    """Time of large products over that at the full rate; 0 where no file states what they achieve.

    Of the dtype, else of the one that is as slow (SAME_SLOWDOWN).
    """
    same = SAME_SLOWDOWN.get(dtype, "") if dtype in gpu.peak_flops_per_s else ""
    for stated in (dtype, same):
        if stated in gpu.achieved_flops_per_s:
            return gpu.full_rate(stated) / gpu.achieved_flops_per_s[stated]
    return 0.0
