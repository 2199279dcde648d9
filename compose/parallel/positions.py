"""How long sequences a captured step has positions for, by its tables of positions."""

from __future__ import annotations

from collections.abc import Iterator

from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.parallel.captured_tables import ROWS


def check_positions(step: StepCapture, cp: int = 1) -> None:
    """ValueError where a table has fewer rows than the numbers 0, 1, 2... that look it up.

    On a GPU such a step ends with an index out of range; fake tensors have no values to tell.
    ``cp``: ranks that share a sequence, of which the step has one rank's part.
    """
    for length, rows in _looked_up(step):
        if length * cp > rows:
            raise ValueError(f"seq {length * cp}: this model has {rows} positions")


def _looked_up(step: StepCapture) -> Iterator[tuple[int, int]]:
    """Of each lookup by consecutive numbers how many there are, and the rows of its table."""
    ends: dict[int, int] = {}  # of the consecutive numbers in a storage
    for call in step.calls:
        if call.op.startswith("aten.arange."):
            ends[call.outputs[0].storage] = _end(call)
        elif call.op.split(".")[1].endswith("_"):  # other numbers are written in their place
            for written in call.tensors()[:1]:
                ends.pop(written.storage, None)
        elif call.op == ROWS and call.args[1].storage in ends:
            yield ends[call.args[1].storage], call.args[0].shape[0]


def _end(call: OpCall) -> int:
    """One more than the last of the numbers that ``arange`` makes."""
    return int(call.args[0] if call.op == "aten.arange.default" else call.args[1])
