"""Attention kernels: which one runs, and its time relative to the measured kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.switches import is_on
from itercast.capture.opcall import OpCall, StepCapture
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import stack_of_row
from itercast.microbench.ops.family import Family

SDPA = "itercast.sdpa"
SDPA_OPS = (SDPA, "itercast.sdpa_backward")
FLASH_2 = "flash-2"
SIXTEEN_BIT = ("bf16", "fp16")
NEWEST: tuple[str, ...] = tuple(assumed(__file__, "newest"))
OVER_FLASH_2: Mapping[str, float] = assumed(__file__, "over_flash_2")
# by op (forward, backward), then by GPU or architecture; where there is none flash 2 is the newest
FLASH_2_OVER_NEWEST: Mapping[str, Mapping[str, float]] = assumed(__file__, "flash_2_over_newest")
KERNELS = (*NEWEST, FLASH_2, *OVER_FLASH_2)
RowSources = Mapping[tuple[str, str], float]  # share of the rows by GPU and software


def with_attention_kernel(capture: StepCapture, stated: str) -> StepCapture:
    """Makes attention calls run the kernel that a published measurement names.

    ``stated`` is its text, which begins with the kernel's name. The step is unchanged where that is
    none of ``KERNELS``: then the stack decides.
    """
    kernel = (stated.replace("/", " ").lower().split() or [""])[0]
    if kernel not in KERNELS:
        return capture
    calls = tuple(
        replace(c, kwargs={**c.kwargs, "kernel": kernel}) if c.op in SDPA_OPS else c
        for c in capture.calls
    )
    return replace(capture, calls=calls)


def has_unequal_widths(call: OpCall) -> bool:
    """Whether a call is attention whose values have another width than its queries."""
    if call.op not in SDPA_OPS:
        return False
    query, _, value = call.args[call.op.endswith("backward") :][:3]
    return bool(query.shape[-1] != value.shape[-1])


def kernel_ratio(
    kernel: str, family: Family, p: Any, gpu: Gpu, measured: RowSources, gpus: Mapping[str, Gpu]
) -> float:
    """Returns the time of an attention kernel over that of the kernels in the measured rows.

    ``p`` is the attention in 16 bit. ``measured`` are the GPUs and stacks whose rows forecast it,
    with their weights, and ``gpus`` their hardware; the time of their kernels is the weighted
    geometric mean. Kernels differ in how well they use the tensor cores, not in memory traffic: if
    a kernel takes R times as long on long sequences, a call takes 1 + (R - 1) * compute / (compute
    + memory) times as long.
    """
    if not is_on("attention_kernels"):
        return 1.0
    compute_s = float(family.flops(p)) / gpu.full_rate(p.dtype)
    compute_share = compute_s / (compute_s + float(family.bytes_moved(p)) / gpu.hbm_bytes_per_s)
    log_of_rows = 0.0
    for (name, stack), weight in measured.items():
        if name in gpus:
            kernel_of_rows = stack_of_row(stack).attention_on(gpus[name])
            ratio = _over_newest(kernel_of_rows, p.op, gpus[name], compute_share)
            log_of_rows += weight * np.log(ratio)
    return float(_over_newest(kernel, p.op, gpu, compute_share) / np.exp(log_of_rows))


def _over_newest(kernel: str, op: str, gpu: Gpu, compute_share: float) -> float:
    """Time of a kernel over that of the newest kernel on a GPU."""
    by_gpu = FLASH_2_OVER_NEWEST[op]
    flash_2 = by_gpu.get(gpu.name, by_gpu.get(gpu.architecture, 1.0))
    base = 1.0 if kernel in NEWEST else flash_2
    return 1 + (base * OVER_FLASH_2.get(kernel, 1.0) - 1) * compute_share
