"""What torch.compile keeps of forward for backward, and what backward computes again from it.

AOTAutograd cuts the graph of forward where the fewest bytes cross to backward, which computes again
what lies behind the cut. It never does

- what is no pointwise op: products, attention, look-ups, joins (``cat``), random numbers, sums;
- what a call that is not fused reads in backward;
- what is four times smaller than what it is made of;
- what reads a result that another call, before a call that is not fused, reads too (torch: "used
  far apart"): a residual sum after its layer, which would be made of all sums before it.

What a checkpoint runs again counts as a forward of its own: its results are kept for the rest of
backward. A norm or softmax is a pointwise op on its input and on the numbers of each row, which are
kept. A result counts 10 % more for each op from backward on, and twice where no kernel writes it
anyway. Left out: chains of more than 100 pointwise ops, which torch cuts. Source: ``solve_min_cut``
in torch/_functorch/partitioners.py of torch 2.13, https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.fused_calls import MakersAndReaders, name_of, read_by
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages
from itercast.microbench.ops import find_family

FORWARD = ("forward", "loss")
JOINS = ("cat", "stack")
KEPT_LOADS = (*JOINS, "flip", "constant_pad_nd", "slice_backward", "select_backward")
SOFTMAX = ("_softmax", "_log_softmax")
OPS = {"_softmax": 3, "_log_softmax": 2, "norm": 4}  # from input to result, without casts to fp32
SMALLER = 4  # ban_if_reduction
AN_OP, FARTHEST, UNWRITTEN = 1.1, 100, 2  # no assumption: defined by torch's get_node_weight

Again = dict[int, tuple[TensorSpec, ...]]  # storage of a result -> what backward makes it of again
UNBOUNDED = 2**62
NEEDED = "needed"  # the node that all of what is needed leads to


def with_kept_rows(
    capture: StepCapture, fused: Callable[[OpCall], bool]
) -> tuple[StepCapture, Again]:
    """The step, and the results that backward computes again, with what it needs for each.

    A softmax that is computed again has a second result: two numbers for each row.
    """
    builder, fresh, row_storages = StepBuilder(capture), fresh_storages(capture), set[int]()
    for i, call in enumerate(capture.calls):
        if _is_forward(call) and name_of(call) in SOFTMAX and fused(call):
            result = call.outputs[0]
            rows = result.numel // max(1, result.shape[call.args[1]])
            maxima_and_sums = TensorSpec(shape=(rows, 2), dtype="fp32", storage=next(fresh))
            call = replace(call, outputs=(result, maxima_and_sums))
            row_storages.add(maxima_and_sums.storage)
        builder.add(i, call)
    step = _Step(builder.step(), fused)
    again: Again = {}
    for own_calls in step.forwards():
        again.update(_Forward(step, own_calls).computed_again())
    unread = row_storages - {t.storage for leaves in again.values() for t in leaves}
    calls = (
        replace(c, outputs=c.outputs[:1]) if c.outputs and c.outputs[-1].storage in unread else c
        for c in step.calls
    )
    return replace(builder.step(), calls=tuple(calls)), again


def is_backward(call: OpCall) -> bool:
    """Whether a call is of backward, and nothing that a checkpoint runs again."""
    return call.phase == "backward" and not call.recomputed


def _is_forward(call: OpCall) -> bool:
    return call.phase in FORWARD or call.recomputed


class _Step(MakersAndReaders):
    """Which calls are fused, and the largest tensor of each storage."""

    def __init__(self, capture: StepCapture, fused: Callable[[OpCall], bool]) -> None:
        super().__init__(capture.calls, makes=lambda call: call.phase in (*FORWARD, "backward"))
        self.fused = list(map(fused, capture.calls))
        self.largest: dict[int, TensorSpec] = {}
        for t in (t for call in capture.calls for t in call.touched):
            if t.nbytes >= getattr(self.largest.get(t.storage), "nbytes", 0):
                self.largest[t.storage] = t
        self.free = self.given - {t.storage for t in capture.inputs}  # parameters, buffers

    def forwards(self) -> Iterable[list[int]]:
        """The calls of each compiled function's forward, and those that checkpoints run again."""
        groups: dict[tuple[str, int], list[int]] = {}
        for i, call in enumerate(self.calls):
            if _is_forward(call):
                groups.setdefault((call.phase, call.compiled), []).append(i)
        return [group for group in groups.values() if any(self.fused[i] for i in group)]

    def made_of(self, i: int) -> Sequence[TensorSpec]:
        """What the first result of a call is made of: what it reads, and its other results."""
        return (*read_by(self.calls[i]), *self.calls[i].outputs[1:])

    def never_recomputed(self, i: int) -> bool:
        """Whether torch bans the first result of call i from being computed again, by its op."""
        call = self.calls[i]
        family, _ = find_family(call)
        if not self.fused[i] or family is None or name_of(call) in KEPT_LOADS:
            return True
        if family.name == "norm" or name_of(call) in SOFTMAX or len(call.outputs) > 1:
            return family.name == "reduction" and name_of(call) not in SOFTMAX
        read_bytes = sum(t.nbytes for t in call.args if isinstance(t, TensorSpec))
        is_small = call.outputs[0].nbytes * SMALLER < read_bytes
        return family.name in ("random", "reduction") or is_small

    def are_fused(self, i: int, reader: int) -> bool:
        """Whether call i is fused with call ``reader``, which reads its result."""
        both = (name_of(self.calls[j]) not in KEPT_LOADS and self.fused[j] for j in (i, reader))
        return name_of(self.calls[reader]) in JOINS or all(both)


class _Forward:
    """Finds what backward needs of a compiled function's forward, and what it can recompute.

    ``own``: the calls of that forward.
    """

    def __init__(self, step: _Step, own: Sequence[int]) -> None:
        self.step, self.own = step, set(own)
        self.compiled = step.calls[own[0]].compiled
        self.makers: dict[int, int] = {}  # storage that can be computed again -> its call
        results = ((i, t) for i in own for t in step.calls[i].outputs)
        far_apart = {reader for i, t in results for reader in self._far_readers(i, t)}
        for i in own:
            if not step.never_recomputed(i) and i not in far_apart and self._is_inside(i):
                self.makers[step.calls[i].outputs[0].storage] = i
        touched = {t.storage for i in own for t in step.calls[i].touched}
        self.needed = [s for s in touched if any(map(self._is_backward, step.readers.get(s, ())))]
        self.distances: dict[int, int] = {}
        for i in reversed(own):
            storages = [t.storage for t in step.calls[i].outputs]
            for storage in storages:
                self.distances[storage] = self._distance(storage, storages[:1])
            for t in read_by(step.calls[i]):
                self.distances[t.storage] = self._distance(t.storage, ())

    def computed_again(self) -> Iterable[tuple[int, tuple[TensorSpec, ...]]]:
        """Storages of results that backward computes again, each with the tensors it needs."""
        kept = self._kept()
        for storage in self.needed:
            leaves, seen, todo = dict[int, TensorSpec](), {storage}, [storage]
            while todo and storage not in kept:
                for t in self.step.made_of(self.makers[todo.pop()]):
                    if t.storage in kept:
                        leaves[t.storage] = t
                    elif t.storage not in seen:
                        seen.add(t.storage)
                        todo.append(t.storage)
            if leaves:  # not ones: the gradient that a step without a loss is given
                yield storage, tuple(leaves.values())

    def _kept(self) -> set[int]:
        """The storages that are kept of forward: the minimum cut of a graph.

        Each storage is an edge from node (storage, False) to (storage, True) that carries its
        weight; edges without limit lead from what a call reads to what it makes, and to NEEDED.
        Kept are cut edges, what forward does not make, and sources that are read behind the cut.
        """
        flow, sources = Flow(), list[tuple[int, bool]]()
        kept = {s for s in self.needed if s not in self.makers}
        seen, todo = set(self.needed), [s for s in self.needed if s in self.makers]
        for storage in todo:
            flow.edge((storage, True), NEEDED)
        while todo:
            storage = todo.pop()
            flow.edge((storage, False), (storage, True), self._weight(storage))
            if storage not in self.makers:
                sources.append((storage, False))
                continue
            for t in self.step.made_of(self.makers[storage]):
                if t.storage not in kept:
                    flow.edge((t.storage, True), (storage, False))
                    todo += [t.storage] if t.storage not in seen else []
                    seen.add(t.storage)
        behind = flow.behind_cut(sources)  # computed again: what is behind with both of its nodes
        cut = {s for s in seen - kept if (s, True) in behind and (s, False) not in behind}
        return kept | cut | {s for s, _ in sources if (s, True) in behind}

    def _is_backward(self, i: int) -> bool:
        """Whether call i is of this function's backward."""
        call = self.step.calls[i]
        return is_backward(call) and call.compiled == self.compiled

    def _is_inside(self, i: int) -> bool:
        """Whether only calls fused with i read its result, and nothing overwrites its inputs."""
        storage, step = self.step.calls[i].outputs[0].storage, self.step
        if step.makers[storage] != [i] or storage in step.given:
            return False
        later = (max(step.makers.get(t.storage, (0,))) for t in step.made_of(i))
        backward = (r for r in step.readers.get(storage, ()) if r not in self.own)
        fused = all(self._is_backward(r) and step.are_fused(i, r) for r in backward)
        return fused and all(last <= i for last in later)

    def _far_readers(self, i: int, t: TensorSpec) -> list[int]:
        """Readers of a result ``t`` of call i that run late, torch's "used far apart".

        They are fused with i, but run after a call that is not fused and is itself made of ``t``.
        """
        step = self.step
        readers = sorted(r for r in set(step.readers.get(t.storage, ())) if r in self.own)
        if len(readers) < 2:
            return []
        seen, todo = set(readers), [(r, step.are_fused(i, r)) for r in readers]
        heapify(todo)
        while todo:  # what is made of ``t``, in the order of its calls, up to one that is not fused
            at, fused = heappop(todo)
            if not fused:
                return [r for r in readers if r > at and step.are_fused(i, r)]
            for storage in {t.storage for t in step.calls[at].outputs}:
                for r in step.readers.get(storage, ()):
                    if r in self.own and r <= readers[-1] and r not in seen:
                        seen.add(r)
                        heappush(todo, (r, step.are_fused(at, r)))
        return []

    def _distance(self, storage: int, first: Sequence[int]) -> int:
        """Ops between a result and backward, at least 1 and FARTHEST where none reads it.

        ``first``: the first result of the same call, which is made of its others.
        """
        readers = self.step.readers.get(storage, ())
        if any(map(self._is_backward, readers)):
            return 1
        calls = [self.step.calls[r] for r in readers if r in self.own]
        known = [
            _ops(c) + self.distances.get(t.storage, FARTHEST) for c in calls for t in c.outputs
        ]
        known += [1 + self.distances[s] for s in first if s in self.distances]
        return min(known, default=FARTHEST)

    def _weight(self, storage: int) -> int:
        """Weight of a result in the cut between forward and backward, as torch's get_node_weight.

        Its bytes, more the farther it is from backward, twice if it is written for backward alone.
        """
        step = self.step
        if storage in step.free:
            return 0
        made = [i for i in step.makers.get(storage, ()) if i in self.own]
        readers = step.readers.get(storage, ())
        returned = self.own.isdisjoint(readers)
        written = not made or returned or not all(step.are_fused(made[-1], r) for r in readers)
        factor = AN_OP ** min(self.distances[storage], FARTHEST) * (1 if written else UNWRITTEN)
        return int(step.largest[storage].nbytes * factor)


def _ops(call: OpCall) -> int:
    """Pointwise ops from a call's input to its result in the graph that torch cuts."""
    family, _ = find_family(call)
    name = "norm" if family is not None and family.name == "norm" else name_of(call)
    casts = 2 * any(t.dtype != "fp32" for t in call.outputs[:1])
    return OPS[name] + casts if name in OPS else 1


class Flow:
    """A maximum-flow problem: ``left`` is how much may still flow along each edge (start, end)."""

    def __init__(self) -> None:
        self.left: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def edge(self, start: Hashable, end: Hashable, most: int = UNBOUNDED) -> None:
        """Adds to the capacity of an edge."""
        self.left[start][end] = self.left[start].get(end, 0) + most
        self.left[end].setdefault(start, 0)

    def behind_cut(self, sources: Iterable[Hashable]) -> set[Hashable]:
        """The nodes behind the minimum cut between ``sources`` and ``NEEDED``.

        Of several such cuts the last. Pushing flow from one source at a time is enough: a source
        that is saturated stays so while others are pushed.
        """
        for source in sources:
            while path := self._path(source):
                pairs = list(pairwise(path))
                most = min(self.left[a][b] for a, b in pairs)
                for a, b in pairs:
                    self.left[a][b] -= most
                    self.left[b][a] += most
        behind: set[Hashable] = {NEEDED}
        todo: list[Hashable] = [NEEDED]
        while todo:
            end = todo.pop()
            new = [node for node in self.left[end] if node not in behind and self.left[node][end]]
            behind.update(new)
            todo += new
        return behind

    def _path(self, source: Hashable) -> list[Hashable]:
        """The shortest path from a source to NEEDED along which more can flow; empty if none."""
        previous: dict[Hashable, Hashable] = {source: source}
        todo = deque([source])
        while todo:
            node = todo.popleft()
            for neighbour, left in self.left[node].items():
                if left and neighbour not in previous:
                    previous[neighbour] = node
                    todo.append(neighbour)
            if NEEDED in previous:
                break
        else:
            return []
        path: list[Hashable] = [NEEDED]
        while path[-1] != source:
            path.append(previous[path[-1]])
        return path[::-1]
