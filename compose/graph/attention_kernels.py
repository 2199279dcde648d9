"""Attention kernels older than those the models of ``attention`` were measured on."""

from __future__ import annotations

from dataclasses import replace

from microbench.opcall import StepCapture

# Times slower than flash-attention 2: an assumption, the middle of 1.3 to 2.5 (arXiv:2307.08691).
# It was added after errors on MPT's long sequences had been seen: their figures are not zero-shot.
SLOWDOWN = {"triton": 1.9}
SDPA = ("itercast.sdpa", "itercast.sdpa_backward")


def with_attention_kernel(capture: StepCapture, stated: str) -> StepCapture:
    """The step with the kernel that its measurement states, by first word; unchanged if unknown."""
    kernel = (stated.split() or [""])[0]
    if kernel not in SLOWDOWN:
        return capture
    calls = tuple(
        replace(c, kwargs={**c.kwargs, "kernel": kernel}) if c.op in SDPA else c
        for c in capture.calls
    )
    return replace(capture, calls=calls)
