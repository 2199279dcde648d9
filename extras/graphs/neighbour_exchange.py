"""A graph cut among data-parallel ranks: each has a part of the vertices and of their edges.

A layer that sums over neighbours reads features of vertices of other ranks, its halo. Before the
layer each rank packs the rows that others read, and an all_to_all brings them there; in backward
the gradients of the halo return and are added. The rest of the step is that of a rank's own
vertices.

With ``overlap`` the sum over a rank's own vertices runs beside the exchange, and that over the halo
after it; in backward gradients of the halo are made first, and return beside those of own vertices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, exp

from itercast.capture.opcall import Argument, OpCall, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import PlanKey, number, share
from itercast.compose.graph.rewrite import StepBuilder, collective, fresh_storages, with_shape

SELECT = "aten.index_select.default"
SUMS = tuple(
    f"aten.{n}.default" for n in ("index_add", "index_add_", "scatter_add", "scatter_add_")
)


# Keys that such plans may have: replicas are alike but for their part of the graph.
BESIDE = ("dp", "zero", "hsdp", "amp", "compress", "tables", "cached", "node", "nodes")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a graph is cut among ranks (plan key ``cut``).

    ``edges``: share of the edges that join vertices of two ranks. ``halo``: number of other ranks'
    vertices that a rank reads, over the number of its own; 0 where they were not counted.
    ``overlap``: the sum over own vertices runs while features of the halo are exchanged.
    """

    edges: float
    halo: float = 0.0
    overlap: bool = False

    def __str__(self) -> str:
        """The text that a plan has."""
        halo = f":{self.halo:g}" if self.halo else ""
        return f"{self.edges:g}{halo}{':overlap' * self.overlap}"


def read(key: str, text: str) -> Cut:
    """Read ``SHARE`` or ``SHARE:HALO``, each of which ``:overlap`` may follow."""
    edges, colon, halo = text.removesuffix(":overlap").partition(":")
    counted = number("above 0")(f"{key}:N", halo) if colon else 0.0
    return Cut(share(key, edges), counted, text.endswith(":overlap"))


def rules(plan: ParallelPlan, cut: Cut) -> Iterator[tuple[bool, str]]:
    """Pairs of whether a rule is broken, and the rule: a graph is cut among plain replicas."""
    yield plan.dp == 1, "cut is of a graph among dp ranks: dp > 1"
    allowed = {"cut", *BESIDE}.issuperset(plan.stated)
    yield not allowed, f"cut goes with {', '.join(BESIDE)} alone"
    out_of_range = not (0 < cut.edges <= 1 and cut.halo >= 0)
    yield out_of_range, f"cut is up to 1, a halo above 0: {cut.edges}, {cut.halo}"


def cut_graph(capture: StepCapture, plan: ParallelPlan, cut: Cut) -> StepCapture:
    """One rank's step of a full graph; ValueError where the step has no sums over neighbours."""
    graphs = [sizes for c in capture.calls if (sizes := _graph(c)) is not None]
    if not graphs:
        raise ValueError(f"plan {str(plan)!r}: cut is of a graph, and the model has none")
    return _Part(capture, plan.dp, cut, *max(graphs)).step()


def _graph(call: OpCall) -> tuple[int, int] | None:
    """(edges, vertices) of a call that reads vertices by edge: a sparse product or a gather."""
    matrix = next((t for t in call.tensors() if t.layout and len(set(t.shape)) == 1), None)
    if matrix is not None:
        return matrix.nnz, matrix.shape[0]
    if call.op == SELECT and call.args[1] == 0 and call.args[2].numel > call.args[0].shape[0]:
        return call.args[2].numel, call.args[0].shape[0]
    return None


class _Part:
    """Builds the step of one rank; the graph has so many ``edges`` and ``vertices`` in all.

    ``own`` and ``halo``: how many vertices of its own, and of other ranks, the rank reads.
    ``local``: maps the number of vertices, or edges, of the whole graph to the rank's. ``remote``:
    how many of its edges come from the halo.
    """

    def __init__(
        self, capture: StepCapture, ranks: int, cut: Cut, edges: int, vertices: int
    ) -> None:
        self.made, self.ids, self.ranks = StepBuilder(capture), fresh_storages(capture), ranks
        self.edges, self.own = edges, ceil(vertices / ranks)
        self.local = {vertices: self.own, edges: ceil(edges / ranks)}
        others = max(1, vertices - self.own)  # distinct ones that edges come from, any alike
        halo = others * (1 - exp(-cut.edges * edges / ranks / others))
        self.halo = max(1, round(min(others, cut.halo * self.own or halo)))
        self.overlap = cut.overlap
        self.remote = min(self.local[edges] - 1, max(1, round(cut.edges * self.local[edges])))
        calls = [c for c in capture.calls if c.phase == "forward"]
        self.targets = {c.args[2].storage for c in calls if c.op in SUMS}
        self.whole: dict[int, TensorSpec] = {}  # own and halo rows of a tensor, by its storage

    def step(self) -> StepCapture:
        """The rank's step."""
        for i, call in enumerate(self.made.capture.calls):
            if call.phase == "optimizer":
                self.made.add(i, call)
                continue
            reads = self._reads(call)
            rank_call = replace(call, args=self._cut(call.args), outputs=self._cut(call.outputs))
            if reads is None:
                self.made.add(i, rank_call)
            elif self.overlap:
                (self._beside if call.phase == "forward" else self._returned_beside)(
                    i, rank_call, reads
                )
            elif call.phase == "forward":
                self.made.add(i, self._gathered(rank_call, reads))
            else:
                self._returned(i, rank_call)
        return self.made.step()

    def _reads(self, call: OpCall) -> int | None:
        """Index of the argument with features of neighbours (in backward, gradients), or None."""
        places = [n for n, a in enumerate(call.args) if isinstance(a, TensorSpec) and a.layout]
        if places and call.args[places[0]].nnz == self.edges and places[0] + 1 < len(call.args):
            return places[0] + 1  # what the sparse matrix of edges is multiplied by
        if call.op != SELECT and (call.op not in SUMS or call.phase != "backward"):
            return None
        index = call.args[2]
        return 0 if index.numel == self.edges and index.storage not in self.targets else None

    def _gathered(self, call: OpCall, reads: int) -> OpCall:
        """The call on own and halo rows, which are exchanged and joined once for each tensor."""
        x = call.args[reads]
        if x.storage not in self.whole:
            packed, self.whole[x.storage] = self._rows(x), self._rows(x, own=True)
            self._put(SELECT, (x, 0, self._numbers()), packed, call)
            self._exchange(packed, call)
            self._put("aten.cat.default", ((x, packed),), self.whole[x.storage], call)
        args = [self._matrix(a, call) for a in call.args]
        args[reads] = self.whole[x.storage]
        return replace(call, args=tuple(args))

    def _returned(self, i: int, call: OpCall) -> None:
        """Backward of a gathered call: gradients of halo rows return to their ranks' sums."""
        own = call.outputs[0]
        own_and_halo, received, zeros = (
            self._rows(own, own=True),
            self._rows(own),
            replace(own, storage=-1),
        )
        args = [own_and_halo if n == 0 and call.op in SUMS else a for n, a in enumerate(call.args)]
        args = [self._matrix(a, call) for a in args]
        self.made.add(i, replace(call, args=tuple(args), outputs=(own_and_halo,)))
        self._exchange(received, call)
        self._add_returned(received, zeros, own, call)

    def _add_returned(
        self, received: TensorSpec, zeros: TensorSpec, own: TensorSpec, call: OpCall
    ) -> None:
        """Add gradients that other ranks have returned to those of own rows."""
        self._put("aten.zeros.default", (), zeros, call)
        self._put(SUMS[1], (zeros, 0, self._numbers(), received), zeros, call)
        self._put("aten.add.Tensor", (zeros, zeros), own, call)

    def _beside(self, i: int, call: OpCall, reads: int) -> None:
        """Run a call on own rows while the halo is exchanged, then on the halo; add the sums."""
        x, own = call.args[reads], call.outputs[0]
        if x.storage not in self.whole:
            packed, self.whole[x.storage] = self._rows(x), self._rows(x)
            self._put(SELECT, (x, 0, self._numbers()), packed, call)
            self._exchange(packed, call, self.whole[x.storage])
        self.made.calls.append(self._part(call, self.local[self.edges] - self.remote, self.own))
        halo_call = self._part(call, self.remote, self.halo)
        args = tuple(
            self.whole[x.storage] if n == reads else a for n, a in enumerate(halo_call.args)
        )
        self.made.add(i, replace(halo_call, args=args))
        if call.op != SELECT:
            self._put("aten.add_.Tensor", (own, replace(own, storage=next(self.ids))), own, call)

    def _returned_beside(self, i: int, call: OpCall, reads: int) -> None:
        """Send gradients of halo rows back while the call runs on own rows; then add them."""
        own = call.outputs[0]
        halo_gradients, received = self._rows(own), self._rows(own)
        halo_call = self._part(call, self.remote, self.halo)
        self.made.calls.append(replace(halo_call, outputs=(halo_gradients,)))
        self._exchange(halo_gradients, call, received)
        self.made.add(i, self._part(call, self.local[self.edges] - self.remote, self.own))
        self._add_returned(received, replace(own, storage=-1), own, call)

    def _part(self, call: OpCall, edges: int, others: int) -> OpCall:
        """The call over so many edges that come from so many vertices."""
        by_edge = not any(isinstance(a, TensorSpec) and a.layout for a in call.args)
        backward = call.phase == "backward"

        def part(t: Argument) -> Argument:
            if isinstance(t, TensorSpec) and t.layout:
                sides = (others, self.own) if backward else (self.own, others)
                return replace(t, shape=sides, nnz=edges)
            if by_edge and isinstance(t, TensorSpec) and t.shape[0] == self.local[self.edges]:
                return with_shape(t, (edges, *t.shape[1:]))
            return t

        args = [part(a) for a in call.args]
        if by_edge and backward:
            args[0] = with_shape(call.args[0], (others, *call.args[0].shape[1:]))
        return replace(call, args=tuple(args), outputs=tuple(map(part, call.outputs)))

    def _put(self, op: str, args: tuple[Argument, ...], out: TensorSpec, call: OpCall) -> None:
        """Append a call to the phase and module of another."""
        self.made.calls.append(replace(call, op=op, args=args, outputs=(out,), kwargs={}))

    def _exchange(self, rows: TensorSpec, call: OpCall, *received: TensorSpec) -> None:
        """Append the all_to_all of halo rows; its buffer has a part for the rank itself."""
        scale = self.ranks / (self.ranks - 1)
        sent = collective("all_to_all", "dp", rows, call.phase, scale=scale, received=received)
        self.made.calls.append(replace(sent, module=call.module))

    def _rows(self, like: TensorSpec, *, own: bool = False) -> TensorSpec:
        """A new tensor with a row of each vertex in the halo, and of own ones."""
        rows = self.halo + self.own * own
        return replace(like, shape=(rows, *like.shape[1:]), storage=next(self.ids), stride=())

    def _numbers(self) -> TensorSpec:
        """Vertex numbers of the halo's rows."""
        return TensorSpec(shape=(self.halo,), dtype="int64", storage=next(self.ids))

    def _matrix(self, value: Argument, call: OpCall) -> Argument:
        """The rank's part of the matrix has columns for its halo too; in backward, rows."""
        if not (isinstance(value, TensorSpec) and value.layout):
            return value
        sides = (self.own, self.own + self.halo)
        return replace(value, shape=sides if call.phase == "forward" else sides[::-1])

    def _cut(self, value: Argument) -> Argument:
        """Lengths of all vertices and edges become those of the rank."""
        if isinstance(value, tuple):
            return tuple(map(self._cut, value))
        if type(value) is int:
            return self.local.get(value, value)
        if not isinstance(value, TensorSpec):
            return value
        shape = tuple(self.local.get(n, n) for n in value.shape)
        cut = value if shape == value.shape else with_shape(value, shape)
        return replace(cut, nnz=self.local.get(cut.nnz, cut.nnz)) if cut.layout else cut


KEY = PlanKey(name="cut", read=read, rules=rules, changes="ops prices", step=cut_graph)
