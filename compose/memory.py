"""Peak memory of a step on one rank: a walk over the calls' storages."""

from __future__ import annotations

from microbench.opcall import StepCapture

STATE_COPIES = {"adamw": 2, "sgd": 0, "none": 0}  # tensors like the parameter, in its own dtype


def peak_bytes(capture: StepCapture, optimizer: str, dp: int = 1) -> int:
    """Parameters, optimizer state and inputs, plus the peak of gradients and activations.

    An activation is a storage that a call writes before any call reads it; it lives from that call
    to its last use. A gradient lives from the call ``ready_after`` to the end of the step (storages
    written in backward and used by the optimizer are those gradients, not counted again). Inputs
    are storages that forward or loss read first: batch and buffers. With dp > 1, DDP's buckets
    hold a second copy of the gradients. Allocator rounding, workspaces and the CUDA context are not
    counted.
    """
    if optimizer not in STATE_COPIES:
        raise ValueError(f"unknown optimizer {optimizer!r}; known: {sorted(STATE_COPIES)}")
    parameter_bytes = sum(p.nbytes for p in capture.parameters)
    trained = [p for p in capture.parameters if p.ready_after >= 0]
    state_bytes = STATE_COPIES[optimizer] * sum(p.nbytes for p in trained)
    bucket_bytes = sum(p.nbytes for p in trained) if dp > 1 else 0
    input_bytes, live = _activations(capture)
    change = [0] * (len(capture.calls) + 1)
    for first, last, nbytes in live:
        change[first] += nbytes
        change[last + 1] -= nbytes
    for p in trained:
        change[min(p.ready_after, len(capture.calls))] += p.nbytes
    peak = now = 0
    for delta in change:
        now += delta
        peak = max(peak, now)
    return parameter_bytes + state_bytes + bucket_bytes + input_bytes + peak


def _activations(capture: StepCapture) -> tuple[int, list[tuple[int, int, int]]]:
    """Bytes of the inputs, and (first call, last call, bytes) of every activation."""
    outside = {p.storage for p in capture.parameters}
    inputs: dict[int, int] = {}
    size: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(capture.calls):
        for t in call.tensors():
            if t.storage < 0 or t.storage in outside:
                continue
            if t.storage in first:
                last[t.storage] = i
            elif call.phase in ("forward", "loss") or t.storage in inputs:
                inputs[t.storage] = max(inputs.get(t.storage, 0), t.nbytes)
            else:
                outside.add(t.storage)  # optimizer state, or gradients kept from the last step
        for t in call.outputs:
            if t.storage >= 0 and t.storage not in outside and t.storage not in inputs:
                first.setdefault(t.storage, i)
                last[t.storage] = i
                size[t.storage] = max(size.get(t.storage, 0), t.nbytes)
    phases = [call.phase for call in capture.calls]
    live = [
        (start, last[s], size[s])
        for s, start in first.items()
        if not (phases[start] == "backward" and phases[last[s]] == "optimizer")
    ]
    return sum(inputs.values()), live
