"""Peak memory of a step on one rank: a walk over the calls' storages."""

from __future__ import annotations

from itertools import accumulate

from compose.memo import remembered
from compose.update import STATE_COPIES
from microbench.opcall import StepCapture


def peak_bytes(capture: StepCapture, optimizer: str, dp: int = 1) -> int:
    """Parameters and optimizer state, plus the peak of gradients, activations and inputs.

    A storage lives from the call that first touches it to the one that last does. A gradient lives
    from the backward call ``ready_after`` to the end of the step; the storages that backward writes
    and the optimizer reads are those gradients and not counted again, nor are storages that the
    optimizer touches first (its state). With dp > 1, DDP's buckets hold a second copy of the
    gradients. Not counted: allocator rounding, workspaces, the CUDA context.
    """
    if optimizer not in STATE_COPIES:
        raise ValueError(f"unknown optimizer {optimizer!r}; known: {sorted(STATE_COPIES)}")
    calls = capture.calls
    trained = [p for p in capture.parameters if p.ready_after >= 0]
    fixed = sum(p.nbytes for p in capture.parameters)
    fixed += STATE_COPIES[optimizer] * sum(p.nbytes for p in trained)
    fixed += sum(p.nbytes for p in trained) if dp > 1 else 0
    change = [0] * (len(calls) + 1)
    for first, last, nbytes in _lifetimes(capture):
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


@remembered
def _lifetimes(capture: StepCapture) -> list[tuple[int, int, int]]:
    """(first call, last call, bytes) of every storage that is no parameter, gradient or state."""
    parameters = {p.storage for p in capture.parameters}
    size: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    state: set[int] = set()
    for i, call in enumerate(capture.calls):
        inputs = call.tensors()
        for t in (*inputs, *call.outputs):
            if t.storage < 0 or t.storage in parameters:
                continue
            first.setdefault(t.storage, i)
            last[t.storage] = i
            size[t.storage] = max(size.get(t.storage, 0), t.nbytes)
        if call.phase in ("optimizer", "zero_grad"):
            state |= {t.storage for t in inputs if first.get(t.storage) == i}
    phases = [call.phase for call in capture.calls]
    return [
        (start, last[s], size[s])
        for s, start in first.items()
        if s not in state and (phases[start], phases[last[s]]) != ("backward", "optimizer")
    ]


def update_bytes(capture: StepCapture) -> int:
    """Largest total of what the optimizer makes and drops again, its state apart."""
    change: dict[int, int] = {}
    for first, last, nbytes in _lifetimes(capture):
        if capture.calls[first].phase == "optimizer":
            change[first] = change.get(first, 0) + nbytes
            change[last + 1] = change.get(last + 1, 0) - nbytes
    return max(accumulate(change[i] for i in sorted(change)), default=0)
