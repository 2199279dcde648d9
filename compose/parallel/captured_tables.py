"""The embedding tables of a captured step: parameters that are only looked up."""

from __future__ import annotations

from dataclasses import dataclass

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.microbench.ops import find_family

BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
ROWS = "aten.embedding.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCalls:
    """A table of a captured step and the numbers of the calls that look it up."""

    parameter: ParamSpec
    calls: tuple[int, ...]


def captured_tables(capture: StepCapture) -> tuple[TableCalls, ...]:
    """The step's tables in the order of their parameters; tables of positions are none."""
    positions = {t.storage for c in capture.calls if "arange" in c.op for t in c.outputs}
    by_storage: dict[int, list[int]] = {p.storage: [] for p in capture.parameters}
    for i, call in enumerate(capture.calls):
        if call.phase in ("forward", "loss"):
            for t in call.tensors():
                by_storage.get(t.storage, []).append(i)
    pairs = ((p, by_storage[p.storage]) for p in capture.parameters)
    return tuple(
        TableCalls(parameter=p, calls=tuple(uses))
        for p, uses in pairs
        if uses and all(_looks_up(capture.calls[i], p, positions) for i in uses)
    )


def _looks_up(call: OpCall, p: ParamSpec, positions: set[int]) -> bool:
    """Whether the call reads rows of a parameter by row numbers that are no positions."""
    if call.op not in (*BAGS, ROWS) or call.args[0].storage != p.storage:
        return False
    return find_family(call)[1] is not None and call.args[1].storage not in positions
