"""Attention kernels that are slower than the ones the ``attention`` models were measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from microbench.assumptions import assumed
from microbench.opcall import StepCapture

# kernel name -> its time over that of flash-attention 2
ATTENTION_SLOWDOWN: Mapping[str, float] = assumed(__file__, "slowdown")
SDPA_OPS = ("itercast.sdpa", "itercast.sdpa_backward")


def with_attention_kernel(capture: StepCapture, stated: str) -> StepCapture:
    """Sets the attention kernel that a published measurement states, by its first word.

    The step is unchanged where the kernel is not one of ``ATTENTION_SLOWDOWN``.
    """
    kernel = (stated.split() or [""])[0]
    if kernel not in ATTENTION_SLOWDOWN:
        return capture
    calls = tuple(
        replace(c, kwargs={**c.kwargs, "kernel": kernel}) if c.op in SDPA_OPS else c
        for c in capture.calls
    )
    return replace(capture, calls=calls)
