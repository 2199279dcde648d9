"""Host time of one call of an op on a GPU, over that of a pointwise op, learned from sweeps.

Rows of a device sweep hold ``launch_us``, the host's time to call the op once, its code as cold as
after a hundred other ops; ``tiny_launch_us``, that of a pointwise op called over and over; and some
of them ``kernel_count``, how many kernels the call launches. A step repeats few kinds of ops, so
that its calls are warmer than those of a sweep: only their ratios are learned, and a host's speed
says how long they take (``itercast.microbench.hardware.host``). The driver's launch of a kernel is
as warm in a sweep as in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.learners.features.table import columns
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family

MIN_ROWS = 3  # of an op, to take their median
COLD_POINTWISE: float = assumed(__file__, "cold_pointwise")
KERNEL_SHARE: float = assumed(__file__, "kernel_share")
LIST_SPAN = 4.0  # no assumption: longest list of tensors over shortest, to fit a line

HostCalls = Mapping[str, Mapping[str, "HostCall"]]  # by GPU and op


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """Host time of one call in a sweep, in calls of a pointwise op there, and its kernels.

    ``fixed + per_tensor * tensors``; ``per_tensor`` is 0 except for ops on lists of tensors.
    ``kernels`` is the median number of kernels that a call launches, 1 where none was profiled;
    ``rows`` is how many points were used.
    """

    fixed: float
    per_tensor: float = 0.0
    kernels: float = 1.0
    rows: int = 0

    def launches(self, tensors: int) -> float:
        """Host time of a call on ``tensors`` tensors in a step, over that of a pointwise op.

        (1 - KERNEL_SHARE) * its time in a sweep + KERNEL_SHARE * its kernels
        """
        swept = self.fixed + self.per_tensor * tensors
        return (1 - KERNEL_SHARE) * swept + KERNEL_SHARE * self.kernels


def learn_host_calls(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
) -> dict[str, dict[str, HostCall]]:
    """Learn host calls by GPU and op from one family's rows; empty where none was timed.

    Cold rows repeat the launch of their warm row and are left out. So are fused kernels: each was
    timed as a compiled function of its own, whose guards a compiled step checks only once.
    """
    if not {"launch_us", "tiny_launch_us"} <= set(rows) or family.compiled:
        return {}
    rows = rows[(rows["launch_us"] > 0) & (rows["tiny_launch_us"] > 0)]
    if "cache" in rows:
        rows = rows[rows["cache"] != "cold"]
    calls_by_gpu: dict[str, dict[str, HostCall]] = {}
    for (gpu, op), part in rows.groupby(["gpu", call_names(rows, family)]):
        if len(part) >= MIN_ROWS and gpus[str(gpu)].kind != "cpu":
            calls_by_gpu.setdefault(str(gpu), {})[str(op)] = _fit_op(part)
    return calls_by_gpu


def call_names(rows: pd.DataFrame, family: Family) -> np.ndarray:
    """The name of each row's call: its op, or what the family's ``call_name`` says."""
    if family.call_name is None:
        return rows["op"].to_numpy()
    return np.asarray(family.call_name(columns(rows, family)))


def _fit_op(rows: pd.DataFrame) -> HostCall:
    """The host call of one op on one GPU, from its timed launches."""
    pointwise_us = COLD_POINTWISE * float(rows["tiny_launch_us"].median())
    calls = rows["launch_us"].to_numpy(dtype=float) / pointwise_us
    kernels = 1.0
    if "kernel_count" in rows and rows["kernel_count"].notna().any():
        kernels = max(1.0, float(rows["kernel_count"].median()))
    fixed, per_tensor = float(np.median(calls)), 0.0
    if "tensors" in rows:
        tensors = rows["tensors"].fillna(1).to_numpy(dtype=float)
        if tensors.max() >= LIST_SPAN * tensors.min():
            fixed, per_tensor = _line(tensors, calls)
    return HostCall(fixed=fixed, per_tensor=per_tensor, kernels=kernels, rows=len(rows))


def _line(tensors: np.ndarray, calls: np.ndarray) -> tuple[float, float]:
    """Fit calls = fixed + slope * tensors by least squares of relative errors, none negative."""
    slope, fixed = np.polyfit(tensors, calls, 1, w=1 / calls)
    if slope <= 0:
        return float(np.median(calls)), 0.0
    if fixed <= 0:
        return 0.0, float(np.median(calls / tensors))
    return float(fixed), float(slope)


def host_call(calls: HostCalls, gpu: str, op: str) -> HostCall | None:
    """The host call of an op on a GPU; None where no GPU has it.

    A GPU that was not swept takes the median over those that were: the software is the same.
    """
    if (measured := calls.get(gpu, {}).get(op)) is not None:
        return measured
    others: Sequence[HostCall] = [known[op] for known in calls.values() if op in known]
    if not others:
        return None
    fixed, per_tensor, kernels, _ = np.median([astuple(c) for c in others], axis=0)
    return HostCall(
        fixed=float(fixed),
        per_tensor=float(per_tensor),
        kernels=float(kernels),
        rows=sum(c.rows for c in others),
    )
