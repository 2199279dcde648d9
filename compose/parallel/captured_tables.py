"""The embedding tables of a captured step: parameters that are only looked up."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.microbench.ops import find_family

BAG = "aten._embedding_bag.default"
BAGS = (BAG, "aten._embedding_bag_forward_only.default")
ROWS = "aten.embedding.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCalls:
    """A table of a captured step and the indices of the calls that look it up."""

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
    """Whether the call looks rows of ``table`` up by indices whose storage is no position."""
    if call.op not in (*BAGS, ROWS) or call.args[0].storage != table.storage:
        return False
    _, params = find_family(call)
    return params is not None and call.args[1].storage not in positions
