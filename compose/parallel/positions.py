"""How long sequences a captured step has positions for, by its tables of positions."""

from __future__ import annotations

from collections.abc import Iterator

from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.parallel.captured_tables import ROWS


def check_positions(step: StepCapture, cp: int = 1) -> None:
    """ValueError where a table of positions has fewer rows than the sequence is long.

    On a GPU such a step ends with an index out of range; fake tensors have no values to tell.
    ``cp``: ranks that share a sequence, of which the step has one rank's part.
    """
    for length, rows in _position_lookups(step):
        if length * cp > rows:
            raise ValueError(f"seq {length * cp}: this model has {rows} positions")


def _position_lookups(step: StepCapture) -> Iterator[tuple[int, int]]:
    """(end of the positions, rows of the table) of each lookup by what ``arange`` made."""
    ends: dict[int, int] = {}  # storage that ``arange`` filled -> its end
    for call in step.calls:
        if call.op.startswith("aten.arange."):
            ends[call.outputs[0].storage] = _end(call)
        elif call.op.split(".")[1].endswith("_"):  # other numbers are written in their place
            for written in call.tensors()[:1]:
                ends.pop(written.storage, None)
        elif call.op == ROWS and call.args[1].storage in ends:
            yield ends[call.args[1].storage], call.args[0].shape[0]


def _end(call: OpCall) -> int:
    """The argument ``end`` of an ``arange``: one more than the last number that it makes."""
    return int(call.args[0] if call.op == "aten.arange.default" else call.args[1])
