"""The embedding tables of a captured step and the calls that look them up.

A table is a parameter that is looked up and used for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.microbench.iterations.sharded_model import UNIFORM, Table
from itercast.microbench.ops import find_family
from itercast.microbench.ops.lookup.embedding_bag import EmbeddingBag

BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
ROWS = "aten.embedding.default"


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
