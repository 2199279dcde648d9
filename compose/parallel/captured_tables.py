"""The tables of a captured step: of embeddings, only looked up, and of positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.microbench.ops import find_family

BAG = "aten._embedding_bag.default"
BAGS = (BAG, "aten._embedding_bag_forward_only.default")
ROWS = "aten.embedding.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCalls:
    """An embedding table of a captured step, with the indices of the calls that look it up."""

    parameter: ParamSpec
    calls: tuple[int, ...]


def captured_tables(capture: StepCapture) -> tuple[TableCalls, ...]:
    """Parameters that forward only looks rows up in, in the order of the step's parameters.

    Tables that are looked up by position (``arange``) are left out.
    """
    positions = {t.storage for c in capture.calls if "arange" in c.op for t in c.outputs}
    readers: dict[int, list[int]] = {p.storage: [] for p in capture.parameters}
    for i, call in enumerate(capture.calls):
        if call.phase in ("forward", "loss"):
            for t in call.tensors():
                if t.storage in readers:
                    readers[t.storage].append(i)
    return tuple(
        TableCalls(parameter=p, calls=tuple(calls))
        for p in capture.parameters
        if (calls := readers[p.storage])
        and all(_looks_up(capture.calls[i], p, positions) for i in calls)
    )


def _looks_up(call: OpCall, table: ParamSpec, positions: set[int]) -> bool:
    """Whether the call looks up rows of ``table``, by indices that are not positions."""
    if call.op not in (*BAGS, ROWS) or call.args[0].storage != table.storage:
        return False
    _, params = find_family(call)
    return params is not None and call.args[1].storage not in positions


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
