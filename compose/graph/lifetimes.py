"""Lifetimes of the memory that a step allocates, and the optimizer's share of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate

from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.graph.identity_cache import cached_by_identity


def last_uses(calls: Sequence[OpCall]) -> dict[int, int]:
    """Index of the last call that reads or writes a storage."""
    used = ((t, i) for i, call in enumerate(calls) for t in (*call.tensors(), *call.outputs))
    return {t.storage: i for t, i in used}


@cached_by_identity
def lifetimes(capture: StepCapture) -> list[tuple[int, int, int]]:
    """Returns (first call, last call, bytes) of every temporary storage and activation.

    Left out: parameters, their gradients and the optimizer's state.
    """
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


def input_bytes(capture: StepCapture) -> int:
    """Returns the bytes that forward reads and no call makes, but parameters: inputs, buffers."""
    known = {p.storage for p in capture.parameters} | {-1}
    given: dict[int, int] = {}
    for call in capture.calls:
        if call.phase in ("forward", "loss"):
            new = [t for t in call.tensors() if t.storage not in known]
            given |= {t.storage: max(t.nbytes, given.get(t.storage, 0)) for t in new}
        known |= {t.storage for t in call.outputs}
    return sum(given.values())


def update_bytes(capture: StepCapture, calls: Container[int]) -> int:
    """Returns the peak bytes of temporaries of these calls of the optimizer, without its state."""
    change: dict[int, int] = {}
    for first, last, nbytes in lifetimes(capture):
        if first in calls:
            change[first] = change.get(first, 0) + nbytes
            change[last + 1] = change.get(last + 1, 0) - nbytes
    return max(accumulate(change[i] for i in sorted(change)), default=0)


def node_ends(calls: Sequence[OpCall], backward: tuple[int, int]) -> dict[int, int]:
    """Returns, by call of a layer's backward, the last one of its autograd node where it is later.

    Until then it holds all that it has saved. Calls in a row that read one gradient are a node's.
    """
    ends: dict[int, int] = {}
    made = {t.storage for c in calls[slice(*backward)] for t in c.outputs}
    after: set[int] = set()
    for i in range(backward[1] - 1, backward[0] - 1, -1):
        read = made & {t.storage for t in calls[i].tensors()}
        if read & after:
            ends[i] = ends.get(i + 1, i + 1)
        after = read
    return ends


def crossing_bytes(spans: Sequence[tuple[int, int, int]], length: int) -> list[int]:
    """Returns the bytes alive across the cut before each call, from (first, last, bytes)."""
    change = [0] * (length + 2)
    for first, last, nbytes in spans:
        change[first + 1] += nbytes
        change[last + 1] -= nbytes
    return list(accumulate(change))
