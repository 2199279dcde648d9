"""Order of a step's calls in which those that inductor fuses are neighbours.

inductor fuses along the graph of tensors, whatever was called between: ``silu(gate(x)) * up(x)`` is
one kernel although a product comes between its ops. Source: torch/_inductor/scheduler.py in
https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.graph.rewrite import StepBuilder

Asked = Callable[[OpCall], bool]


def in_fusion_order(
    capture: StepCapture, fused: Asked, moved: Asked, place: Callable[[OpCall], object]
) -> StepCapture:
    """The step with calls beside those that they are fused with.

    Each call for which ``moved`` is true comes right after the last one that makes what it reads,
    if that is ``fused`` and of the same ``place``; then right before the first one that reads its
    result. Calls that write in place, and those that read what is overwritten, stay.
    """
    for upward in (True, False):
        calls = capture.calls
        found, places = _Users(calls), list(map(place, calls))
        apart = [i for i, call in enumerate(calls) if not fused(call)]
        at = list(range(len(calls)))  # a call, or the one that it is moved to
        for i in at[:] if upward else reversed(at[:]):
            if not (moved(calls[i]) and found.is_free(i)):
                continue
            others = [at[j] for j in (found.made_by(i) if upward else found.read_by(i))]
            to = (max if upward else min)(others, default=i)
            between = bisect_left(apart, max(i, to)) - bisect_left(apart, min(i, to))
            if between and fused(calls[to]) and places[to] == places[i]:
                at[i] = to
        capture = _ordered(capture, at)
    return capture


class _Users:
    """Who makes and reads each storage of a step."""

    def __init__(self, calls: Sequence[OpCall]) -> None:
        self.calls = calls
        self.makers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for i, call in enumerate(calls):
            for t in call.tensors():
                self.readers.setdefault(t.storage, []).append(i)
            for t in call.outputs:
                self.makers.setdefault(t.storage, []).append(i)

    def made_by(self, i: int) -> Iterable[int]:
        """The calls that make what a call reads."""
        storages = {t.storage for t in self.calls[i].tensors()}
        return [j for name in storages for j in self.makers.get(name, ()) if j < i]

    def read_by(self, i: int) -> Iterable[int]:
        """The calls that read what a call makes."""
        storages = {t.storage for t in self.calls[i].outputs}
        return [j for name in storages for j in self.readers.get(name, ()) if j > i]

    def is_free(self, i: int) -> bool:
        """Whether a call alone writes its results, and nothing of its phase overwrites its inputs.

        Another call of its phase may have written an input in place, but before it.
        """
        call = self.calls[i]
        read = {t.storage for t in call.tensors()}
        alone = all(len(self.makers[t.storage]) == 1 for t in call.outputs)
        given = any(t.storage in read for t in call.outputs)
        later = (j for name in read for j in self.makers.get(name, ()) if j > i)
        return alone and not given and all(self.calls[j].phase != call.phase for j in later)


def _ordered(capture: StepCapture, at: Sequence[int]) -> StepCapture:
    """The step with call i beside call ``at[i]``; calls at the same place keep their order."""
    made = StepBuilder(capture)
    for i in sorted(range(len(at)), key=lambda i: (at[i], i)):
        made.add(i, capture.calls[i])
    return made.step()
