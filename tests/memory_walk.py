"""Peak memory of a step as a walk over all of its calls: what closed forms are held against."""

from __future__ import annotations

from itercast.compose.graph.lifetimes import lifetimes
from itercast.compose.pricing.optimizer import STATE_COPIES
from itercast.microbench.opcall import StepCapture


def peak_bytes(capture: StepCapture, optimizer: str) -> int:
    """Parameters and optimizer state, plus the peak of gradients, activations and inputs.

    A storage lives from the call that first touches it to the one that last does. A gradient lives
    from the backward call ``ready_after`` to the end of the step; the storages that backward writes
    and the optimizer reads are those gradients and not counted again, nor are storages that the
    optimizer touches first (its state). Allocator rounding, workspaces and CUDA's context are
    not counted.
    """
    calls = capture.calls
    trained = [p for p in capture.parameters if p.ready_after >= 0]
    fixed = sum(p.nbytes for p in capture.parameters)
    fixed += STATE_COPIES[optimizer] * sum(p.nbytes for p in trained)
    change = [0] * (len(calls) + 1)
    for first, last, nbytes in lifetimes(capture):
        change[first] += nbytes
        change[last + 1] -= nbytes
    for p in trained:
        if p.ready_after < len(calls) and calls[p.ready_after].phase == "backward":
            change[p.ready_after] += p.nbytes
    peak = now = 0
    for delta in change:
        now += delta
        peak = max(peak, now)
    return fixed + peak
