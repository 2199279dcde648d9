"""Lists the ops of a step that take longest, and what limits each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import numpy as np

from itercast.capture.base.slow_imports import pd
from itercast.capture.opcall import StepCapture
from itercast.compose.pricing.priced_op import Priceable
from itercast.compose.target import Target
from itercast.learners.features.rooflines import bounds_us
from itercast.learners.features.table import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class HotOp:
    """Equal calls of an op in one iteration of a rank: how long they take and what limits them.

    ``time_us`` is the time of all ``calls``. ``bound``: memory or compute, whichever takes longer
    in the roofline; ``roofline_frac``: roofline over forecast time.
    """

    op: str
    shape: str
    phase: str
    calls: int
    time_us: float
    bound: str
    roofline_frac: float


def hot_ops(step: StepCapture, target: Target, limit: int) -> list[HotOp]:
    """The ops of forward and backward that take most time, equal calls together.

    ``step`` is one micro-batch of the target's plan. Ops of the optimizer and recomputed ones are
    not among them.
    """
    model = target.priced(step)
    calls: dict[tuple[Any, ...], int] = defaultdict(int)
    wanted: dict[tuple[Any, ...], Priceable] = {}
    for layer in model.layers:
        spans = (layer.layer.forward, layer.layer.backward)
        for i in (i for a, b in spans for i in range(a, b)):
            if one := model.graph.asked.ops.get(i):
                key = (one.op, one.phase, one.params, one.kernel, one.bytes_moved, one.cold)
                calls[key] += layer.layer.count * target.plan.microbatches
                wanted[key] = one
    priced = target.book.price(list(wanted.values()))
    us = {key: calls[key] * op.duration_us for key, op in zip(wanted, priced, strict=True)}
    longest = sorted(us, key=lambda key: -us[key])[:limit]
    return [_hot_op(wanted[key], calls[key], us[key], target) for key in longest]


def _hot_op(one: Priceable, calls: int, time_us: float, target: Target) -> HotOp:
    """What limits an op that takes ``time_us`` in ``calls`` equal calls."""
    gpu = target.gpu
    compute_us, memory_us = 0.0, 1e6 * one.bytes_moved / gpu.hbm_bytes_per_s
    if one.family is not None and one.params is not None:
        threads = target.threads or gpu.sm_count
        point = columns(pd.DataFrame([asdict(one.params)]), one.family)
        bounds = bounds_us(one.family, point, gpu, np.array([threads]))
        compute_us, memory_us = (float(us[0]) for us in bounds)
    return HotOp(
        op=one.op.partition(".")[2].removesuffix(".default"),
        shape=_shape(one.params),
        phase=one.phase,
        calls=calls,
        time_us=time_us,
        bound="compute" if compute_us > memory_us else "memory",
        roofline_frac=min(1.0, calls * max(compute_us, memory_us) / time_us) if time_us else 0.0,
    )


def _shape(params: Any) -> str:
    """Parameters of an op that are not their defaults, as text."""
    if params is None:
        return ""
    values = ((f, getattr(params, f.name)) for f in fields(params) if f.name not in ("op", "dtype"))
    told = [f"{f.name}={v}" for f, v in values if f.default is MISSING or v != f.default]
    return " ".join([*told, getattr(params, "dtype", "")]).strip()
