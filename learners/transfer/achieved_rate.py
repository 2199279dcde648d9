"""GPUs whose products were not measured, but of which is known what large products reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from learners.features.table import LAUNCH_FLOOR_US, bounds_us, columns
from learners.transfer.source_gpus import SAME_UNITS, Asked, Lenders, Whose
from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

UNSTATED = {"fp8": "bf16"}
Price = Callable[[pd.DataFrame], np.ndarray]


def correction(asked: Asked, lenders: Lenders, price: Price) -> np.ndarray:
    """Factors that bring the large op of each GPU and dtype that was not measured to its rate.

    Of other ops, a power of that factor: the share of computing in their bounds, over that of the
    large op. Measured rows have 1; what is slow in bf16 for want of power is so in fp8, whose rates
    are not stated, on GPUs never measured. ``price`` forecasts rows in us without this correction.
    """
    found, family = np.ones(len(asked.gpu)), asked.family
    unmeasured = lenders.unmeasured(asked)
    if family.large is None or not unmeasured.any():
        return found
    where = np.flatnonzero(unmeasured)
    rows = asked.rows.iloc[where]
    whose = pd.MultiIndex.from_arrays([asked.gpu[where], columns(rows, family).dtype])
    codes, distinct = pd.factorize(whose)
    for code, (name, dtype) in enumerate(distinct):
        gpu = asked.gpus[name]
        stated = dtype if dtype in gpu.reached_flops_per_s else UNSTATED.get(dtype, "")
        own = name in lenders.measured and stated != dtype
        if stated in gpu.reached_flops_per_s and not own:
            mine = codes == code
            large = _computing(_large(family, [gpu], dtype), family, gpu)
            share = np.minimum(_computing(rows[mine], family, gpu) / large, 1.0)
            found[where[mine]] = _factor(gpu, stated, asked, lenders, price) ** share
    return found


def _factor(gpu: Gpu, dtype: str, asked: Asked, lenders: Lenders, price: Price) -> float:
    """Known over forecast time of the large op, beside that of the GPUs that lend.

    Their software need not be as fast as what was published.
    """
    family, units = asked.family, SAME_UNITS.get(dtype, dtype)
    shares = {
        name: share
        for (name, _), share in lenders.shares(
            Whose(gpu=gpu.name, dtype=units), gpu, family
        ).items()
        if name != gpu.name and units in lenders.measured[name]
        if dtype in asked.gpus[name].reached_flops_per_s
    }
    gpus = [gpu, *(asked.gpus[name] for name in shares)]
    large = _large(family, gpus, dtype)
    flops = np.asarray(family.flops(columns(large, family)), dtype=float)
    known_us = 1e6 * flops / [g.reached_flops_per_s[dtype] for g in gpus]
    slower = np.log(known_us / price(large))
    usual = np.average(slower[1:], weights=list(shares.values())) if shares else 0.0
    return float(np.exp(slower[0] - usual))


def _large(family: Family, gpus: Sequence[Gpu], dtype: str) -> pd.DataFrame:
    """The large op on each GPU."""
    assert family.large is not None
    facts = asdict(family.large(dtype))
    return pd.DataFrame([{"family": family.name, "gpu": gpu.name, **facts} for gpu in gpus])


def _computing(rows: pd.DataFrame, family: Family, gpu: Gpu) -> Any:
    """Share of computing in the sum of each row's bounds: computing, memory, launch."""
    compute_us, memory_us = bounds_us(family, columns(rows, family), gpu, 0)
    return compute_us / (compute_us + memory_us + LAUNCH_FLOOR_US[gpu.kind])
