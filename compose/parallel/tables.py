"""Sharded embedding tables: one rank's step of a model whose tables are spread over its replicas.

The rank's step:

1. its samples' row numbers go to the ranks that hold the rows (all_to_all);
2. it looks its shards up for the samples of all ranks;
3. pooled vectors go back (all_to_all) beside all that needs none of them;
4. the rest of the forward pass, and backward down to the gradients of pooled vectors;
5. these go to the shards (all_to_all) beside the rest of backward;
6. after backward, which ends when DDP has reduced the other gradients, its shards are updated with
   the gradients of the rows looked up, then the rest.

Messages are as large as the most that any rank sends or receives, by which an uneven all_to_all
takes its time (arXiv 2404.12674). Copies around them are those of
``itercast.microbench.iterations.sharded_dlrm``, on a CPU with its ops of one element per sample.
Tables that stay data-parallel are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.compose.graph.rewrite import StepBuilder, collective, fresh_storages
from itercast.compose.parallel.captured_tables import (
    BAGS,
    ROWS,
    CapturedTable,
    Lookup,
    OptimizerLists,
    gradient_calls,
)
from itercast.compose.parallel.placement import (
    INDEX_BYTES,
    Shard,
    Sharding,
    Table,
    length_bytes,
    message_bytes,
    shards,
)
from itercast.microbench.assumptions import assumed
from itercast.microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.microbench.ops.lookup.embedding_bag import MODES
from itercast.microbench.ops.step.host import REPEATED

SMALL_OPS: Mapping[str, int] = assumed(__file__, "small_ops")
PASSES_IN_PARTS: int = assumed(__file__, "passes_in_parts")
PASSES: Mapping[str, int] = assumed(__file__, "passes")
SPARSE_BACKWARD, SPARSE_UPDATE = "itercast.sparse_backward", "itercast.sparse_update"
# Parts that tables add to a step, and their phases.
PHASES: Mapping[str, str] = {
    "pack numbers": "forward",
    "send numbers": "forward",
    "sort numbers": "forward",
    "look up": "forward",
    "pack vectors": "forward",
    "send vectors": "forward",
    "join vectors": "forward",
    "pack gradients": "backward",
    "send gradients": "backward",
    "update tables": "optimizer",
}
LOOPS = (  # of small ops, by part
    ("pack numbers", ("sent", "sent_in_parts")),
    ("look up", ("held",)),
    ("join vectors", ("joined",)),
    ("update tables", ("updated",)),
)
PER_TENSOR = ("zero_grad", "accumulate_grad")  # host events that come once per parameter


def shard_stream(table: Table, rows: int, samples: int) -> dict[str, Any]:
    """Statistics of the row numbers looked up in a shard: parameters of ``EmbeddingBag`` by name.

    A shard with a part of the table's rows gets that part of its distinct rows.
    """
    facts = table.stream.facts(table.rows, samples) if table.pooled else {}
    if rows < table.rows and "unique" in facts:
        facts["unique"] = max(1, round(facts["unique"] * rows / table.rows))
    facts.pop("lookups", None)
    return facts


def lookup_calls(
    shard: Shard, lookup: Lookup, ranks: int, optimizer: str, ids: Iterator[int], tables: int = 1
) -> tuple[OpCall, tuple[OpCall, ...]]:
    """A shard's lookup for the samples of all ranks; the gradient of its rows, and their update.

    ``tables`` like it are looked up one after the other.
    """
    table, samples = lookup.table, (1 if shard.local else ranks) * lookup.samples
    looked_up = max(1, round(samples * table.pooling * shard.rows / table.rows))
    facts = shard_stream(table, shard.rows, samples)
    if tables > 1:
        facts["tables"] = tables
    known: dict[str, Any] = {"kwargs": {"stream": facts}} if facts else {}
    mode = MODES.index(lookup.mode)

    def tensor(*shape: int, dtype: str = table.dtype) -> TensorSpec:
        return TensorSpec(shape=shape, dtype=dtype, storage=next(ids))

    weight, index = tensor(shard.rows, shard.columns), tensor(looked_up, dtype="int64")
    vectors = samples if table.pooled else looked_up
    out, received = tensor(vectors, shard.columns), tensor(vectors, shard.columns)
    gradient = tensor(looked_up, shard.columns) if table.pooled else received
    backward = []
    if table.pooled:
        args = (received, index, shard.rows, mode, table.weighted)
        backward.append(OpCall(op=SPARSE_BACKWARD, args=args, outputs=(gradient,), **known))
    if optimizer != "none":
        how = optimizer if optimizer in ("sgd", "adagrad") else "adam"
        update = OpCall(op=SPARSE_UPDATE, args=(weight, gradient, how), outputs=(weight,), **known)
        backward.append(update)
    after = tuple(replace(call, phase="optimizer") for call in backward)
    if not table.pooled:
        return OpCall(op=ROWS, args=(weight, index), outputs=(out,)), after
    weights = tensor(looked_up) if table.weighted else None
    starts = tensor(samples, dtype="int64")
    bag = (weight, index, starts, False, mode, True, weights)
    return OpCall(op=BAGS[0], args=bag, outputs=(out,), **known), after


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of messages by rank; pooled vectors' gradients are as many bytes the other way."""

    index_sent: np.ndarray
    index_received: np.ndarray
    lengths_sent: np.ndarray  # of bags, ahead of the row numbers
    lengths_received: np.ndarray
    vectors_sent: np.ndarray
    vectors_received: np.ndarray


def traffic(held: Sequence[tuple[Shard, Lookup]], ranks: int) -> Traffic:
    """What lookups of shards send and receive; shards that are local send nothing."""
    index_sent, index_received, sent, received = np.zeros((4, ranks))
    lengths_sent, lengths_received = np.zeros((2, ranks))
    for shard, lookup in held:
        if not shard.local:
            index_bytes, vector_bytes = message_bytes(shard, lookup.table, lookup.samples)
            index_sent += index_bytes
            index_received[shard.rank] += ranks * index_bytes
            lengths = length_bytes(shard, lookup.table, lookup.samples)
            lengths_sent += lengths
            lengths_received[shard.rank] += ranks * lengths
            sent[shard.rank] += ranks * vector_bytes
            received += vector_bytes
    return Traffic(
        index_sent=index_sent,
        index_received=index_received,
        lengths_sent=lengths_sent,
        lengths_received=lengths_received,
        vectors_sent=sent,
        vectors_received=received,
    )


def held_shards(
    tables: Sequence[CapturedTable], sharding: Sharding, per_node: int
) -> list[tuple[Shard, Lookup]]:
    """Every shard with each of the calls that look its table up."""
    return [
        (shard, lookup)
        for i, (found, place) in enumerate(zip(tables, sharding, strict=True))
        for shard in shards(found.table, i, place, per_node)
        for lookup in found.lookups
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What tables add to the step of one rank.

    ``mine``: the shards that it holds. By part of the step (``PHASES``), in bytes: what it copies,
    and the messages that all ranks exchange; and its small ops (``SMALL_OPS``; none on a GPU).
    """

    mine: Sequence[tuple[Shard, Lookup]]
    copied: Mapping[str, Sequence[float]]
    sent: Mapping[str, Sequence[float]]
    small_ops: Mapping[str, int]

    @property
    def own(self) -> Sequence[tuple[Shard, Lookup]]:
        """Shards that are looked up for the samples of all ranks."""
        return [(s, x) for s, x in self.mine if not s.local]


def table_work(
    held: Sequence[tuple[Shard, Lookup]], rank: int, ranks: int, *, on_cpu: bool
) -> TableWork:
    """The work of one rank; a message takes as long as the most that any rank sends or receives."""
    moved, spread = traffic(held, ranks), [(s, x) for s, x in held if not s.local]
    own = sum(s.rank == rank for s, _ in spread)
    cut = [x for s, x in spread if s.rows < x.table.rows]
    chosen = [PASSES_IN_PARTS * INDEX_BYTES * x.samples * x.table.pooling for x in cut]
    lengths = float(np.maximum(moved.lengths_sent, moved.lengths_received).max())
    numbers = float(np.maximum(moved.index_sent, moved.index_received).max())
    vectors = float(np.maximum(moved.vectors_sent, moved.vectors_received).max())
    packed, received = moved.vectors_sent[rank], moved.vectors_received[rank]
    rearranged = {
        "sort numbers": [PASSES["row_numbers"] * moved.index_received[rank]],
        "join vectors": [PASSES["joined"] * received],
        "pack gradients": [PASSES["gradients"] * received],
    }
    counts = {"sent": len(spread) - len(cut), "sent_in_parts": len(cut), "held": own}
    counts |= {"joined": len(spread), "updated": own}
    small_ops = {part: sum(SMALL_OPS[k] * counts[k] for k in kinds) for part, kinds in LOOPS}
    return TableWork(
        mine=[(s, x) for s, x in held if s.rank == rank],
        copied={
            "pack numbers": [*chosen, lengths + numbers],
            "pack vectors": [packed],
            "update tables": [packed],
            **(rearranged if on_cpu else {}),
        },
        sent={
            "send numbers": [lengths, numbers],
            "send vectors": [vectors],
            "send gradients": [vectors],
        },
        small_ops=small_ops if on_cpu else {},
    )


def in_a_row(tables: Sequence[CapturedTable], ranks: int, *, on_cpu: bool) -> int:
    """Lookups that a rank makes one after the other, on average; a GPU's follow other ops."""
    return max(1, round(sum(len(t.lookups) for t in tables) / ranks)) if on_cpu else 1


class RankStep:
    """Builds the step of one rank whose tables are looked up one after the other.

    Calls that tables add have their part of the step as ``module``. ``row``: lookups in a row.
    """

    batched = False

    def __init__(
        self, capture: StepCapture, work: TableWork, ranks: int, optimizer: str, row: int
    ) -> None:
        self.capture, self.work, self.ranks, self.optimizer = capture, work, ranks, optimizer
        self.made, self.ids = StepBuilder(capture), fresh_storages(capture)
        self.ready: dict[int, int] = {}  # by table, call that makes the gradient of a copy
        self.own = [lookup_calls(s, x, ranks, optimizer, self.ids, row) for s, x in work.own]
        self.own_shards = [s for s, _ in work.own]
        self.weights: list[TensorSpec] = [forward.args[0] for forward, _ in self.own]

    def distribute_and_look_up(self, pooled: Sequence[TensorSpec]) -> None:
        """Add the exchange of row numbers, own lookups, and the exchange of ``pooled`` vectors."""
        for part in ("pack numbers", "send numbers", "sort numbers"):
            self._part(part)
        self._part("look up", [forward for forward, _ in self.own])
        self._part("pack vectors")
        self._part("send vectors", received=pooled)

    def join(self, pooled: Sequence[TensorSpec]) -> None:
        """Add what puts the received vectors in order."""
        self._part("join vectors", read=pooled[0].storage)

    def send_gradients(self) -> None:
        """Add the exchange of pooled vectors' gradients."""
        self._part("pack gradients")
        first = [back[0] for _, back in self.own if back]
        gradients = [c.args[0 if c.op == SPARSE_BACKWARD else 1] for c in first]
        self._part("send gradients", received=gradients)

    def update_shards(self) -> None:
        """Add the gradients of own shards' rows, and their addition to the tables."""
        self._part("update tables", [call for _, back in self.own for call in back])

    def _part(
        self,
        part: str,
        calls: Sequence[OpCall] = (),
        received: Sequence[TensorSpec] = (),
        read: int | None = None,
    ) -> None:
        """Add a part of the step: its copies (of the tensor ``read``), calls and messages."""
        for nbytes in self.work.copied.get(part, ()):
            source, made = self._buffer(nbytes), self._buffer(nbytes)
            source = source if read is None else replace(source, storage=read)
            copy = OpCall(op="aten.clone.default", args=(source,), outputs=(made,))
            self._add([copy] if nbytes else [], part)
        self._add(calls, part)
        for nbytes in self.work.sent.get(part, ()):
            message = collective(
                "all_to_all", "dp", self._buffer(nbytes), "", received=tuple(received)
            )
            self._add([message] if nbytes else [], part)

    def _add(self, calls: Sequence[OpCall], part: str) -> None:
        self.made.calls += [replace(c, phase=PHASES[part], module=part) for c in calls]

    def _buffer(self, nbytes: float) -> TensorSpec:
        """A buffer that nothing else uses."""
        return TensorSpec(shape=(max(1, round(nbytes / 4)),), dtype="fp32", storage=next(self.ids))


def rank_step(
    capture: StepCapture,
    tables: Sequence[CapturedTable],
    sharding: Sharding,
    rank: int,
    ranks: int,
    per_node: int,
    *,
    on_cpu: bool,
    kind: type[RankStep] = RankStep,
    optimizer: str = "",
) -> StepCapture:
    """The step of one rank under a sharding of the step's tables.

    Copies of a table are left to data parallelism, unless kernels over all tables take them too.
    ``optimizer``: of spread tables; by default that of the step.
    """
    spread = [
        t
        for t, p in zip(tables, sharding, strict=True)
        if kind.batched or p.kind != "data_parallel"
    ]
    if not spread:
        return capture
    calls = capture.calls
    held, row = held_shards(tables, sharding, per_node), in_a_row(tables, ranks, on_cpu=on_cpu)
    work = table_work(held, rank, ranks, on_cpu=on_cpu)
    step = kind(capture, work, ranks, optimizer or capture.optimizer, row)
    looked_up = {x.call for t in spread for x in t.lookups}
    pooled = [calls[i].outputs[0] for i in sorted(looked_up)]
    gradients = {i for t in spread for i in gradient_calls(capture, t)}
    first, joined = _first_and_joined(calls, looked_up, {t.storage for t in pooled})
    last = max((i for i, c in enumerate(calls) if c.phase == "backward"), default=-1)
    gone = {t.storage for i in gradients for t in calls[i].outputs}
    gone |= {t.parameter.storage for t in spread}
    updates = OptimizerLists(calls, gone)
    for i, call in enumerate(calls):
        if i == first:
            step.distribute_and_look_up(pooled)
        if i == joined:
            step.join(pooled)
        kept = updates.without(call) if call.phase == "optimizer" else call
        if i not in looked_up and i not in gradients and kept is not None:
            step.made.add(i, kept)
        if gradients and i == max(gradients):
            step.send_gradients()
        if gradients and i == last:
            step.update_shards()
    return _finished(step, spread)


def _finished(step: RankStep, spread: Sequence[CapturedTable]) -> StepCapture:
    """The built step, with own shards in place of the tables and without their host events."""
    tables = {t.parameter.storage: t for t in spread}
    whole = [p for p in step.capture.parameters if p.storage not in tables]
    own = {s.table: (s, t) for s, t in zip(step.own_shards, step.weights, strict=True)}
    parts = [
        ParamSpec(
            name=f"shard_{number}",
            shape=(s.rows, s.columns),
            dtype=weight.dtype,
            storage=weight.storage,
            ready_after=step.ready.get(number, -1),
        )
        for number, (s, weight) in own.items()
    ]
    made = step.made.step([*whole, *parts])
    trained = sum(t.parameter.ready_after >= 0 for t in spread)
    gone = dict.fromkeys((*PER_TENSOR, *(n for n in made.host if n.endswith("_step"))), trained)
    lookups = sum(len(t.lookups) for t in spread)
    gone |= {"module_call": lookups, "autograd_node": max(0, lookups - len(step.own))}
    host = {name: max(0, n - gone.get(name, 0)) for name, n in made.host.items()}
    host[REPEATED] = sum(step.work.small_ops.values())
    if step.work.small_ops and any(
        back for _, back in step.own
    ):  # their own backward and optimizer
        host["backward"] = host.get("backward", 0) + 1
        if step.capture.optimizer == "sgd":
            host["sgd_step"] = host.get("sgd_step", 0) + len(step.own)
    return replace(made, host=host)


def _first_and_joined(
    calls: Sequence[OpCall], looked_up: set[int], pooled: set[int]
) -> tuple[int, int]:
    """The call before which row numbers are sent, and the first one that reads a pooled vector."""
    makers = {t.storage: i for i, c in enumerate(calls) for t in c.outputs}
    numbers = max(makers.get(calls[i].args[1].storage, -1) for i in looked_up)
    phases = [i for i, c in enumerate(calls) if c.phase == "forward"]
    reads = (
        i
        for i, c in enumerate(calls)
        if i not in looked_up and any(t.storage in pooled for t in c.tensors())
    )
    joined = next(reads, len(calls))
    return min(max(numbers + 1, phases[0]), joined), joined
