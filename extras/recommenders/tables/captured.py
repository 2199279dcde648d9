"""The tables of a captured step as shardings have them, and the lookups of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.compose.parallel import captured_tables as core
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.recommenders.sharded_model import UNIFORM, Shard, Table
from itercast.microbench.ops import find_family


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One call that looks a table up for ``samples`` of one rank; ``mode`` as of embedding bags.

    ``alike``: number of tensor-parallel ranks with the same samples; each asks other ranks for a
    part of the rows.
    """

    call: int
    samples: int
    table: Table
    mode: str = "sum"
    alike: int = 1

    @property
    def asked(self) -> int:
        """Samples whose rows a rank asks other ranks for."""
        return -(-self.samples // self.alike)

    def samples_of(self, shard: Shard, ranks: int) -> int:
        """Samples that a shard is looked up for: a copy for its rank's own, others for all."""
        return self.samples if shard.local else ranks * self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTable:
    """A table of a captured step and the calls that look it up."""

    parameter: ParamSpec
    lookups: tuple[Lookup, ...]

    @property
    def table(self) -> Table:
        """The table as its first call looks it up."""
        return self.lookups[0].table


def captured_tables(capture: StepCapture, alike: int = 1) -> tuple[CapturedTable, ...]:
    """The step's tables in the order of their parameters; ``alike`` as of ``Lookup``."""
    return tuple(
        CapturedTable(
            parameter=found.parameter,
            lookups=tuple(
                _lookup(i, capture.calls[i], found.parameter, alike) for i in found.calls
            ),
        )
        for found in core.captured_tables(capture)
    )


def _lookup(i: int, call: OpCall, p: ParamSpec, alike: int) -> Lookup:
    """The call as a lookup of a parameter by row numbers."""
    params: Any = find_family(call)[1]
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
    mode = params.mode if bag else "sum"
    return Lookup(call=i, samples=samples, table=table, mode=mode, alike=alike)
