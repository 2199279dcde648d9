"""Sharded tables that a rank looks up in one kernel and updates in another (HugeCTR, FBGEMM).

The lookup reads a row per lookup and writes vectors straight into the buffer that is sent. The
update sorts the lookups by row, adds up the gradients of equal rows, and reads and writes each
touched row once: no gradient of a row stands in memory. Copies of tables take part; their whole
gradients are made in backward and summed over ranks with those of the dense part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, StepCapture, TensorSpec
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.lookups.random_streams import unique_rows
from itercast.extras.recommenders.sharded_model import Shard, state_per_weight
from itercast.extras.recommenders.tables.captured import CapturedTable, Lookup
from itercast.extras.recommenders.tables.fetched_rows import shard_stream
from itercast.extras.recommenders.tables.rank_step import RankStep
from itercast.extras.recommenders.tables.table_work import TableWork
from itercast.microbench.hardware.stack import TableSoftware
from itercast.microbench.ops.memory.fused import CALL

MODULE = "Tables"  # of the kernels over all tables
SORT_PASSES: int = assumed(__file__, "sort_passes")


def as_stored(
    tables: Sequence[CapturedTable], software: TableSoftware
) -> tuple[CapturedTable, ...]:
    """The tables as the software stores them and sends their vectors and row numbers."""

    def stored(x: Lookup) -> Lookup:
        table = replace(
            x.table,
            dtype=software.weights or x.table.dtype,
            sent=x.table.dtype,
            index=software.index,
            lengths=software.lengths,
        )
        return replace(x, table=table)

    return tuple(replace(t, lookups=tuple(map(stored, t.lookups))) for t in tables)


def bytes_of_lookups(shard: Shard, lookup: Lookup, ranks: int, optimizer: str) -> dict[str, float]:
    """Bytes that a shard's lookup reads and writes, and those of its update.

    ``read``: a row and a row number per lookup; ``written``: a vector per sample. ``sorted``: row
    numbers and lookups' numbers at each pass; ``gradients``: one per lookup; ``updated``: touched
    rows and their state, read and written.
    """
    table, samples = lookup.table, lookup.samples_of(shard, ranks)
    looked_up = max(1, round(samples * table.pooling * shard.rows / table.rows))
    p = EmbeddingBag(
        op="forward",
        rows=shard.rows,
        dim=shard.columns,
        bags=samples,
        lookups=looked_up,
        dtype=table.dtype,
        **shard_stream(table, shard.rows, samples),
    )
    row_bytes = shard.columns * ITEMSIZE_BYTES[table.dtype]
    number, sent_bytes = ITEMSIZE_BYTES[table.index], shard.columns * table.sent_bytes
    touched_bytes = float(unique_rows(p)) * row_bytes
    return {
        "read": looked_up * (row_bytes + number),
        "written": (samples if table.pooled else looked_up) * sent_bytes,
        "sorted": 2 * SORT_PASSES * 2 * number * looked_up,
        "gradients": looked_up * sent_bytes,
        "updated": 2 * (1 + state_per_weight(optimizer)) * touched_bytes,
    }


def batched_calls(
    held: Sequence[tuple[Shard, Lookup]], ranks: int, optimizer: str, ids: Iterator[int]
) -> tuple[OpCall, tuple[OpCall, ...]]:
    """The kernel that looks up all of these shards, and the kernel that updates them."""
    moved = _total(held, ranks, optimizer)
    lookup = _kernel(moved["read"], moved["written"], ids, "forward")
    if optimizer == "none":
        return lookup, ()
    sorting, rows = moved["sorted"] / 2, moved["updated"] / 2
    update = _kernel(sorting + moved["gradients"] + rows, sorting + rows, ids, "optimizer")
    return lookup, (update,)


def _total(held: Sequence[tuple[Shard, Lookup]], ranks: int, optimizer: str) -> dict[str, float]:
    moved = [bytes_of_lookups(s, x, ranks, optimizer) for s, x in held]
    return {name: sum(one[name] for one in moved) for name in moved[0]}


def _kernel(read: float, written: float, ids: Iterator[int], phase: str) -> OpCall:
    """One kernel that reads and writes so many bytes."""
    a, b = (
        TensorSpec(shape=(max(1, round(n)),), dtype="int8", storage=next(ids))
        for n in (read, written)
    )
    how = {"ops": 1, "numel": b.numel}
    return OpCall(op=CALL, args=(a,), kwargs=how, outputs=(b,), phase=phase, module=MODULE)


class BatchedStep(RankStep):
    """Builds the step of one rank whose tables are looked up in one kernel."""

    batched = True

    def __init__(
        self, capture: StepCapture, work: TableWork, ranks: int, optimizer: str, row: int
    ) -> None:
        super().__init__(capture, work, ranks, optimizer, row)
        mine, copies = work.mine, [(s, x) for s, x in work.mine if s.local]
        self.own_shards = [s for s, _ in mine]
        self.weights = [
            TensorSpec(shape=(s.rows, s.columns), dtype=x.table.dtype, storage=next(self.ids))
            for s, x in mine
        ]
        both, of_copies, parts = (
            [batched_calls(some, ranks, optimizer, self.ids)] if some else []
            for some in (mine, copies, work.own)
        )
        self.lookups = [self._on_tables(forward) for forward, _ in both]
        self.copied = [
            self._on_tables(replace(c, phase="backward")) for _, back in of_copies for c in back
        ]
        self.updates = [self._on_tables(c) for _, back in parts for c in back]
        self.own = parts

    def _on_tables(self, kernel: OpCall) -> OpCall:
        """The kernel with tables of its own beside its buffers; it moves a part of the tables."""
        return replace(kernel, kwargs={**kernel.kwargs, "tables": tuple(self.weights)})

    def distribute_and_look_up(self, pooled: Sequence[TensorSpec]) -> None:
        """Add own lookups, the exchange of vectors, and that of the next step's row numbers."""
        self._part("fetch rows")
        self.made.calls += self.lookups
        self._part("send vectors", received=pooled)
        self._part("send numbers", received=[self._buffer(1)])  # which this step does not read

    def gather_and_join(self, pooled: Sequence[TensorSpec]) -> None:
        """Add the vectors of all samples to those of a rank's part; they arrive in order."""
        self._part("gather vectors")

    def send_gradients(self) -> None:
        """Add the exchange of pooled vectors' gradients."""
        self._part("send gradients", received=[c.args[0] for c in self.updates])

    def update_shards(self) -> None:
        """Add the gradients of copies, the last ones of backward, and the update of own shards."""
        number = len(self.capture.calls)  # of no call of the capture
        for call in self.copied:
            self.made.add(number, call)
            self.ready = {s.table: number for s in self.own_shards if s.local}
        self.made.calls += self.updates * self.micro
