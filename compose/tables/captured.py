"""What of a captured step belongs to embedding tables: lookups, gradients, the optimizer's share.

A table is a parameter that is looked up and used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.microbench.iterations.sharded_model import UNIFORM, Table
from itercast.microbench.ops import find_family
from itercast.microbench.ops.lookup.embedding_bag import EmbeddingBag

BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
ROWS = "aten.embedding.default"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One call that looks a table up for ``samples`` of one rank; ``mode`` as of embedding bags."""

    call: int
    samples: int
    table: Table
    mode: str = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTable:
    """A table of a captured step and the calls that look it up."""

    parameter: ParamSpec
    lookups: tuple[Lookup, ...]

    @property
    def table(self) -> Table:
        """The table as its first call looks it up."""
        return self.lookups[0].table


def captured_tables(capture: StepCapture) -> tuple[CapturedTable, ...]:
    """The step's tables in the order of their parameters; tables of positions are none."""
    positions = {t.storage for c in capture.calls if "arange" in c.op for t in c.outputs}
    by_storage: dict[int, list[int]] = {p.storage: [] for p in capture.parameters}
    for i, call in enumerate(capture.calls):
        if call.phase in ("forward", "loss"):
            for t in call.tensors():
                by_storage.get(t.storage, []).append(i)
    found = []
    for p in capture.parameters:
        uses = [_lookup(i, capture.calls[i], p, positions) for i in by_storage[p.storage]]
        lookups = tuple(x for x in uses if x is not None)
        if lookups and len(lookups) == len(uses):
            found.append(CapturedTable(parameter=p, lookups=lookups))
    return tuple(found)


def _lookup(i: int, call: OpCall, p: ParamSpec, positions: set[int]) -> Lookup | None:
    """The call as a lookup of a parameter by row numbers; None where it is none."""
    if call.op not in (*BAGS, ROWS) or call.args[0].storage != p.storage:
        return None
    params: Any = find_family(call)[1]
    if params is None or call.args[1].storage in positions:
        return None
    bag = isinstance(params, EmbeddingBag)
    samples = params.bags if bag else params.lookups
    table = Table(
        name=p.name.removesuffix(".weight"),
        rows=params.rows,
        dim=params.dim,
        pooling=call.args[1].numel / samples,
        dtype=params.dtype,
        weighted=bag and params.weighted,
        stream=call.kwargs.get("drawn") or UNIFORM,
        pooled=bag,
    )
    return Lookup(call=i, samples=samples, table=table, mode=params.mode if bag else "sum")


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
