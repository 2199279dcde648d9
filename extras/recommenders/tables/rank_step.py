"""Sharded embedding tables: one rank's step of a model whose tables are spread over its replicas.

The rank's step:

1. its samples' row numbers go to the ranks that hold the rows (all_to_all);
2. it looks its shards up for the samples of all ranks; rows that lie outside of the GPU's memory
   are fetched before (``tiers``);
3. pooled vectors go back (all_to_all) beside all that needs none of them;
4. the rest of the forward pass, and backward down to the gradients of pooled vectors;
5. these go to the shards (all_to_all) beside the rest of backward;
6. after backward, which ends when DDP has reduced the other gradients, its shards are updated with
   the gradients of the rows looked up, then the rest.

Tensor-parallel ranks have the same samples: each asks for its part of them (1), gathers the vectors
of all from its neighbours (before they are read) and sends the gradients of its part (5).

Messages are as large as the most that any rank sends or receives, by which an uneven all_to_all
takes its time (arXiv 2404.12674). Copies around them are those of
``itercast.extras.recommenders.sharded_dlrm``, on a CPU with its ops of one element per sample.
Tables that stay data-parallel are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.capture.step import update_of
from itercast.compose.graph.rewrite import StepBuilder, collective, fresh_storages
from itercast.extras.recommenders.tables.captured import CapturedTable
from itercast.extras.recommenders.tables.placement import Sharding
from itercast.extras.recommenders.tables.table_work import (
    PHASES,
    SPARSE_BACKWARD,
    TableWork,
    choosing_calls,
    held_shards,
    in_a_row,
    lookup_calls,
    table_work,
)
from itercast.microbench.ops.step.host import REPEATED

AMONG = {"gather vectors": ("all_gather", "tp")}  # messages that are no all_to_all
PER_TENSOR = ("zero_grad", "accumulate_grad")  # host events that come once per parameter
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


class RankStep:
    """Builds the step of one rank whose tables are looked up one after the other.

    Calls that tables add have their part of the step as ``module``. ``row``: how many lookups
    follow each other.
    """

    batched = False
    micro = 1  # micro-batches of a step: tables are updated with the rows of each

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
        for asked, kept in self.work.chosen:
            self._add(choosing_calls(asked, kept, self.ids), "pack numbers")
        for part in ("pack numbers", "send numbers", "sort numbers", "fetch rows"):
            self._part(part)
        self._part("look up", [forward for forward, _ in self.own])
        self._part("pack vectors")
        self._part("send vectors", received=pooled)

    def gather_and_join(self, pooled: Sequence[TensorSpec]) -> None:
        """Add the vectors of all samples to those of a rank's part, and what puts them in order."""
        self._part("gather vectors")
        self._part("join vectors", read=pooled[0].storage)

    def send_gradients(self) -> None:
        """Add the exchange of pooled vectors' gradients."""
        self._part("pack gradients")
        first = [back[0] for _, back in self.own if back]
        gradients = [c.args[0 if c.op == SPARSE_BACKWARD else 1] for c in first]
        self._part("send gradients", received=gradients)

    def update_shards(self) -> None:
        """Add the gradients of own shards' rows, and their addition to the tables."""
        for _ in range(self.micro):
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
            kind, axis = AMONG.get(part, ("all_to_all", "tables"))
            message = collective(kind, axis, self._buffer(nbytes), "", received=tuple(received))
            self._add([message] if nbytes else [], part)
        for (tier, kind), nbytes in (self.work.fetched if part == "fetch rows" else {}).items():
            rows = replace(self._buffer(nbytes), storage=-1)  # they stream, no memory holds them
            self._add([collective(kind, tier, rows, "")], part)

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
    micro: int = 1,
) -> StepCapture:
    """The step of one rank under a sharding of the step's tables.

    Copies of a table are left to data parallelism, unless kernels over all tables take them too.
    ``optimizer``: of spread tables; by default that of the step. ``micro``: micro-batches of
    a step.
    """
    pairs = zip(tables, sharding, strict=True)
    spread = [t for t, p in pairs if kind.batched or p.kind != "data_parallel"]
    if not spread:
        return capture
    held, row = held_shards(tables, sharding, per_node), in_a_row(tables, ranks, on_cpu=on_cpu)
    optimizer = optimizer or update_of(capture.optimizer)
    work = table_work(held, rank, ranks, on_cpu=on_cpu, optimizer=optimizer)
    step = kind(capture, work, ranks, optimizer, row)
    step.micro = micro
    gone = _CallsOfTables.of(capture, spread)
    updates = OptimizerLists(capture.calls, gone.storages)
    for i, call in enumerate(capture.calls):
        if i == gone.first:
            step.distribute_and_look_up(gone.pooled)
        if i == gone.joined:
            step.gather_and_join(gone.pooled)
        kept = updates.without(call) if call.phase == "optimizer" else call
        if i not in gone.numbers and kept is not None:
            step.made.add(i, kept)
        if i == gone.arrived:
            step.send_gradients()
        if i == gone.last:
            step.update_shards()
    return _finished(step, spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallsOfTables:
    """Which calls of a step belong to spread tables, and where their replacements go.

    ``storages``: tables and their gradients. ``pooled``: vectors that are looked up. As indices of
    calls: before ``first`` row numbers are sent; ``joined`` is the first to read a pooled vector;
    after ``arrived`` the gradients of all pooled vectors are there; ``last`` ends backward. The
    last two are -1 without gradients.
    """

    numbers: set[int]
    storages: set[int]
    pooled: Sequence[TensorSpec]
    first: int
    joined: int
    arrived: int
    last: int

    @classmethod
    def of(cls, capture: StepCapture, spread: Sequence[CapturedTable]) -> _CallsOfTables:
        """Find the calls and places of these tables in a captured step."""
        calls, looked_up = capture.calls, sorted({x.call for t in spread for x in t.lookups})
        gradients = gradient_calls(capture, spread)
        pooled = [calls[i].outputs[0] for i in looked_up]
        makers = {t.storage: i for i, c in enumerate(calls) for t in c.outputs}
        made = [makers.get(calls[i].args[1].storage, -1) for i in looked_up]  # row numbers
        forward = next(i for i, c in enumerate(calls) if c.phase == "forward")
        vectors = {t.storage for t in pooled}
        reads = (i for i, c in enumerate(calls) if vectors & {t.storage for t in c.tensors()})
        joined = next((i for i in reads if i not in looked_up), len(calls))
        backward = [i for i, c in enumerate(calls) if c.phase == "backward" and gradients]
        return cls(
            numbers={*looked_up, *gradients},
            storages={t.storage for i in gradients for t in calls[i].outputs}
            | {t.parameter.storage for t in spread},
            pooled=pooled,
            first=min(max(max(made) + 1, forward), joined),
            joined=joined,
            arrived=_gradients_made(calls, gradients) if gradients else -1,
            last=max(backward, default=-1),
        )


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
            local=number not in step.ready,
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
    if step.work.small_ops and any(back for _, back in step.own):  # own backward and update
        host["backward"] = host.get("backward", 0) + 1
        if update_of(step.capture.optimizer) == "sgd":
            host["sgd_step"] = host.get("sgd_step", 0) + len(step.own)
    return replace(made, host=host)


def _gradients_made(calls: Sequence[OpCall], gradients: set[int]) -> int:
    """The call after which the gradients of all pooled vectors are there."""
    makers = {t.storage: i for i, c in enumerate(calls) if i not in gradients for t in c.outputs}
    reads = (t for i in gradients for t in calls[i].tensors())
    return max((makers[t.storage] for t in reads if t.storage in makers), default=-1)


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
