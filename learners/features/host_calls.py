"""Host time of one call of an op on a GPU, learned op by op from sweeps of that GPU.

Rows of a device sweep hold ``launch_us``, the host's time to call the op once while the device's
queue is empty, and some of them ``kernel_count``, how many kernels the call launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import pandas as pd

from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family

MIN_ROWS = 3  # of an op, to take their median
LIST_SPAN = 4.0  # no assumption: longest list of tensors over shortest, to fit a line

HostCalls = Mapping[str, Mapping[str, "HostCall"]]  # by GPU and op


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """Host time of one call: ``fixed_us + per_tensor_us * tensors``.

    ``per_tensor_us`` is 0 except for ops on lists of tensors. ``kernels`` is the median number of
    kernels that a call launches, 1 where none was profiled; ``rows`` is how many points were used.
    """

    fixed_us: float
    per_tensor_us: float = 0.0
    kernels: float = 1.0
    rows: int = 0

    def us(self, tensors: int) -> float:
        """Host time in us of a call on a list of ``tensors`` tensors."""
        return self.fixed_us + self.per_tensor_us * tensors


def learn_host_calls(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
) -> dict[str, dict[str, HostCall]]:
    """Learn host calls by GPU and op from one family's rows; empty if none has ``launch_us``.

    Cold rows repeat the launch of their warm row and are left out. So are fused kernels: each was
    timed as a compiled function of its own, whose guards a compiled step checks only once.
    """
    if "launch_us" not in rows or family.compiled:
        return {}
    rows = rows[rows["launch_us"] > 0]
    if "cache" in rows:
        rows = rows[rows["cache"] != "cold"]
    found: dict[str, dict[str, HostCall]] = {}
    for (gpu, op), part in rows.groupby(["gpu", "op"]):
        if len(part) >= MIN_ROWS and gpus[str(gpu)].kind != "cpu":
            found.setdefault(str(gpu), {})[str(op)] = _fit_op(part)
    return found


def _fit_op(rows: pd.DataFrame) -> HostCall:
    us = rows["launch_us"].to_numpy(dtype=float)
    kernels = 1.0
    if "kernel_count" in rows and rows["kernel_count"].notna().any():
        kernels = max(1.0, float(rows["kernel_count"].median()))
    fixed_us, per_tensor_us = float(np.median(us)), 0.0
    if "tensors" in rows:
        tensors = rows["tensors"].fillna(1).to_numpy(dtype=float)
        if tensors.max() >= LIST_SPAN * tensors.min():
            fixed_us, per_tensor_us = _line(tensors, us)
    return HostCall(fixed_us=fixed_us, per_tensor_us=per_tensor_us, kernels=kernels, rows=len(rows))


def _line(tensors: np.ndarray, us: np.ndarray) -> tuple[float, float]:
    """Fit us = fixed + slope * tensors by least squares of relative errors, neither negative."""
    slope, fixed = np.polyfit(tensors, us, 1, w=1 / us)
    if slope <= 0:
        return float(np.median(us)), 0.0
    if fixed <= 0:
        return 0.0, float(np.median(us / tensors))
    return float(fixed), float(slope)


def host_call(calls: HostCalls, gpu: str, op: str) -> HostCall | None:
    """The host call of an op on a GPU; None where no GPU has it.

    A GPU that was not swept takes the median over those that were: the cost is the host's.
    """
    if (measured := calls.get(gpu, {}).get(op)) is not None:
        return measured
    others: Sequence[HostCall] = [known[op] for known in calls.values() if op in known]
    if not others:
        return None
    fixed_us, per_tensor_us, kernels, _ = np.median([astuple(c) for c in others], axis=0)
    return HostCall(
        fixed_us=float(fixed_us),
        per_tensor_us=float(per_tensor_us),
        kernels=float(kernels),
        rows=sum(c.rows for c in others),
    )
