"""The calls of a captured step that go with its embedding tables: gradients, the optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.extras.recommenders.tables.captured import CapturedTable

# Ops that make a table's gradient from those of its pooled vectors; the last three if it is sparse.
GRADIENTS = (
    "aten._embedding_bag_backward.default",
    "aten._embedding_bag_dense_backward.default",
    "aten.embedding_dense_backward.default",
    "aten.index_select.default",
    "aten.clone.default",
    "aten._unsafe_view.default",
)
SUMS = ("aten.add.Tensor", "aten.add_.Tensor")  # of the gradients of several lookups


def gradient_calls(capture: StepCapture, tables: Sequence[CapturedTable]) -> set[int]:
    """The calls that make tables' gradients from those of their pooled vectors."""
    calls, shapes = capture.calls, {t.parameter.shape for t in tables}
    makers: dict[int, list[int]] = {}
    for i, call in enumerate(calls):
        for t in call.outputs if call.phase == "backward" else ():
            makers.setdefault(t.storage, []).append(i)
    found, waiting = set[int](), [t.parameter.ready_after for t in tables]
    while waiting:
        i = waiting.pop()
        call = calls[i]
        sums = call.op in SUMS and call.outputs[0].shape in shapes
        if i >= 0 and i not in found and (sums or call.op in GRADIENTS):
            found.add(i)
            waiting += [j for t in call.tensors() for j in makers.get(t.storage, ()) if j < i]
    return found


class OptimizerLists:
    """Takes tables out of the optimizer's calls, some of which are over lists of all parameters."""

    def __init__(self, calls: Sequence[OpCall], gone: set[int]) -> None:
        self.gone = gone
        self.places: dict[int, set[int]] = {}  # by length of a list, where tables are in it
        for call in calls:
            for values in call.args if call.phase == "optimizer" else ():
                if isinstance(values, tuple):
                    at = {k for k, t in enumerate(values) if self._is_gone(t)}
                    self.places.setdefault(len(values), set()).update(at)

    def _is_gone(self, t: Any) -> bool:
        return isinstance(t, TensorSpec) and t.storage in self.gone

    def without(self, call: OpCall) -> OpCall | None:
        """The call without them; None where nothing is left."""
        if call.args and self._is_gone(call.args[0]):
            return None
        args = tuple(self._kept(a) if isinstance(a, tuple) else a for a in call.args)
        if args and args[0] == () and call.args[0] != ():
            return None
        return replace(call, args=args, outputs=self._kept(call.outputs))

    def _kept(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        places = self.places.get(len(values), set())
        return tuple(v for k, v in enumerate(values) if k not in places)
