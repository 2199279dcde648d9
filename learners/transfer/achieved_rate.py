"""Corrects forecasts of matrix products by rates that hardware files state of their GPUs.

``achieved_flops_per_s`` is what large products achieve, of use where a GPU has no rows;
``full_rate_flops_per_s`` what tensor cores could do without the limit that some cards put on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.capture.base.switches import is_on
from itercast.learners.features.table import (
    LAUNCH_FLOOR_US,
    bounds_us,
    columns,
    halved_rate_bound_us,
)
from itercast.learners.transfer.query_rows import EQUAL_SPEED_DTYPE, QueryRows, RowGroup
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family, Values

SAME_SLOWDOWN = assumed(__file__, "same_slowdown")  # dtypes without a stated rate
Price = Callable[["pd.DataFrame"], np.ndarray]


def bounded_us(time_us: np.ndarray, query: QueryRows) -> np.ndarray:
    """Times, at least flops / peak on GPUs whose tensor cores are limited below their full rate."""
    if not is_on("limited_tensor_cores"):
        return time_us
    return np.asarray(
        np.maximum(time_us, halved_rate_bound_us(query.rows, query.family, query.gpus))
    )


def correction(query: QueryRows, source_gpus: SourceGpus, price: Price) -> np.ndarray:
    """Factors on forecasts in dtypes without rows on their GPU; 1 where there are such rows.

    ``_large_op_factor`` compares the forecast of the family's large op (a large square product)
    with its time at the rate that the GPU's file states. Another op gets

        large op's factor ** (compute share of the op / compute share of the large op)

    with an exponent of at most 1 (``_compute_share``): the less an op is bound by compute, the less
    it is corrected. ``price`` forecasts rows in us without this correction.
    """
    factors, family = np.ones(len(query.gpu)), query.family
    unmeasured = source_gpus.unseen_dtype(query) | query.stood_in
    if not is_on("achieved_rate") or family.large is None or not unmeasured.any():
        return factors
    where = np.flatnonzero(unmeasured)
    rows = query.rows.iloc[where]
    keys = pd.MultiIndex.from_arrays([query.gpu[where], columns(rows, family).dtype])
    codes, distinct = pd.factorize(keys)
    for code, (name, dtype) in enumerate(distinct):
        gpu = query.gpus[name]
        same = SAME_SLOWDOWN.get(dtype, "") if dtype in gpu.peak_flops_per_s else ""
        stated = dtype if dtype in gpu.achieved_flops_per_s else same
        has_rows = name in source_gpus.measured and stated != dtype
        if stated in gpu.achieved_flops_per_s and not has_rows:
            mine = codes == code
            large = _compute_share(_large_rows(family, [gpu], dtype), family, gpu)
            share = np.minimum(_compute_share(rows[mine], family, gpu) / large, 1.0)
            factors[where[mine]] = _large_op_factor(gpu, stated, query, source_gpus, price) ** share
    return factors


def _large_op_factor(
    gpu: Gpu, dtype: str, query: QueryRows, source_gpus: SourceGpus, price: Price
) -> float:
    """Correction of the large op on ``gpu``: its slowdown over that on its source GPUs.

    slowdown = time at the stated rate / forecast; of the source GPUs the weighted geometric mean.
    It is divided by that of the source GPUs because their software may be slower than the published
    one.
    """
    family, equal = query.family, EQUAL_SPEED_DTYPE.get(dtype, dtype)
    asked = source_gpus.stand_in_dtype(gpu, equal)
    group, theirs = RowGroup(gpu=gpu.name, dtype=asked), dtype if asked == equal else asked
    weights = {
        name: weight
        for (name, _), weight in source_gpus.weights(group, gpu, family).items()
        if (name != gpu.name or asked != equal) and asked in source_gpus.measured[name]
        if theirs in query.gpus[name].achieved_flops_per_s
    }
    sources = [query.gpus[name] for name in weights]
    large = _large_rows(family, [gpu], dtype)
    if sources:
        large = pd.concat([large, _large_rows(family, sources, theirs)], ignore_index=True)
    flops = np.asarray(family.flops(columns(large, family)), dtype=float)
    rates = [g.achieved_flops_per_s[theirs] for g in sources]
    stated_us = 1e6 * flops / [gpu.achieved_flops_per_s[dtype], *rates]
    slowdown = np.log(stated_us / price(large))
    usual = np.average(slowdown[1:], weights=list(weights.values())) if weights else 0.0
    return float(np.exp(slowdown[0] - usual))


def _large_rows(family: Family, gpus: Sequence[Gpu], dtype: str) -> pd.DataFrame:
    """The family's large op on each GPU, as rows; ValueError for a family without one."""
    if family.large is None:
        raise ValueError(f"family {family.name}: states no large op")
    facts = asdict(family.large(dtype))
    return pd.DataFrame([{"family": family.name, "gpu": gpu.name, **facts} for gpu in gpus])


def _compute_share(rows: pd.DataFrame, family: Family, gpu: Gpu) -> Values:
    """compute / (compute + memory + launch floor) of each row's bounds in us."""
    compute_us, memory_us = bounds_us(family, columns(rows, family), gpu, 0)
    return compute_us / (compute_us + memory_us + LAUNCH_FLOOR_US[gpu.kind])
