"""Peak memory of a step, from what a capture shows of its tensors' lives."""

from __future__ import annotations

from microbench.opcall import StepCapture

STATES = {"adamw": 2, "sgd": 0, "none": 0}


def peak_bytes(capture: StepCapture, optimizer: str) -> int:
    """Parameters, optimizer state, and the largest sum of tensors alive at one call.

    A tensor lives from the call that first writes it to the last call that touches it; gradients
    are among them. Allocator overhead and the optimizer's temporaries are not counted.
    """
    owned = {p.storage for p in capture.parameters}
    fixed = sum(p.nbytes for p in capture.parameters) * (1 + STATES[optimizer])
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for index, call in enumerate(capture.calls):
        for tensor in (*call.tensors(), *call.outputs):
            if tensor.storage not in owned:
                first.setdefault(tensor.storage, index)
                last[tensor.storage] = index
                size[tensor.storage] = max(size.get(tensor.storage, 0), tensor.nbytes)
    change = [0] * (len(capture.calls) + 1)
    state = _optimizer_only(capture)
    for storage, nbytes in size.items():
        if storage not in state:
            change[first[storage]] += nbytes
            change[last[storage] + 1] -= nbytes
    peak = alive = 0
    for delta in change:
        alive += delta
        peak = max(peak, alive)
    return fixed + peak


def _optimizer_only(capture: StepCapture) -> set[int]:
    """Storages no other phase touches: optimizer state and its temporaries."""
    seen: dict[int, bool] = {}
    for call in capture.calls:
        for tensor in (*call.tensors(), *call.outputs):
            inside = call.phase == "optimizer"
            seen[tensor.storage] = seen.get(tensor.storage, True) and inside
    return {storage for storage, only in seen.items() if only}
