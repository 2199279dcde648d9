"""Order of a step's calls in which those that inductor fuses are neighbours.

inductor fuses along the graph of tensors, whatever was called between: ``silu(gate(x)) * up(x)`` is
one kernel although a product comes between its ops. Source: torch/_inductor/scheduler.py in
https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.graph.compiled.fused_calls import MakersAndReaders
from itercast.compose.graph.rewrite import StepBuilder

CallTest = Callable[[OpCall], bool]


def in_fusion_order(
    capture: StepCapture, fused: CallTest, movable: CallTest, place: Callable[[OpCall], object]
) -> StepCapture:
    """The step with calls beside those that they are fused with.

    A ``movable`` call is moved right behind the last call that makes one of its inputs, if that
    call is ``fused``, has the same ``place``, and unfused calls lie between. Then, by the same
    rules, it is moved right before the first call that reads its result. Calls that write in place,
    or read what is overwritten, stay.
    """
    for to_makers in (True, False):
        calls = capture.calls
        users, places = _Users(calls, OpCall.tensors), list(map(place, calls))
        not_fused = [i for i, call in enumerate(calls) if not fused(call)]
        position = list(range(len(calls)))  # of a call: its own, or the call that it is moved to
        for i in range(len(calls)) if to_makers else reversed(range(len(calls))):
            if not (movable(calls[i]) and users.is_free(i)):
                continue
            if to_makers:
                target = max((position[j] for j in users.makers_read_by(i)), default=i)
            else:
                target = min((position[j] for j in users.readers_of(i)), default=i)
            low, high = sorted((i, target))
            not_fused_between = bisect_left(not_fused, high) - bisect_left(not_fused, low)
            if not_fused_between and fused(calls[target]) and places[target] == places[i]:
                position[i] = target
        capture = _ordered(capture, position)
    return capture


class _Users(MakersAndReaders):
    """Which calls others are moved to, and which may be moved."""

    def makers_read_by(self, i: int) -> Iterable[int]:
        """The earlier calls that make what call i reads."""
        storages = {t.storage for t in self.calls[i].tensors()}
        return [j for name in storages for j in self.makers.get(name, ()) if j < i]

    def readers_of(self, i: int) -> Iterable[int]:
        """The later calls that read what call i makes."""
        storages = {t.storage for t in self.calls[i].outputs}
        return [j for name in storages for j in self.readers.get(name, ()) if j > i]

    def is_free(self, i: int) -> bool:
        """Whether call i may be moved.

        For this it is the only writer of its results, writes none in place, and no later call of
        its phase overwrites its inputs.
        """
        call = self.calls[i]
        read = {t.storage for t in call.tensors()}
        only_writer = all(len(self.makers[t.storage]) == 1 for t in call.outputs)
        in_place = any(t.storage in read for t in call.outputs)
        overwriters = (j for storage in read for j in self.makers.get(storage, ()) if j > i)
        overwritten = any(self.calls[j].phase == call.phase for j in overwriters)
        return only_writer and not in_place and not overwritten


def _ordered(capture: StepCapture, position: Sequence[int]) -> StepCapture:
    """The step with each call i moved to ``position[i]``; equal positions keep their order."""
    builder = StepBuilder(capture)
    for i in sorted(range(len(position)), key=lambda i: (position[i], i)):
        builder.add(i, capture.calls[i])
    return builder.step()
