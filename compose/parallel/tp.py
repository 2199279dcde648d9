"""Tensor parallelism of any captured model, after Megatron-LM (arXiv:1909.08053, 2205.05198).

Linear layers come in pairs: the first is cut by columns, the second by rows (``product_roles``);
experts too, unless the plan keeps them whole. What lies between is cut as its inputs are
(``cuts``). Added: an all_reduce of the second's output in forward, and of the first's input
gradient in backward. With ``sp`` each becomes a reduce_scatter, with an all_gather before the next
pair, and backward gathers the inputs of first layers once more, beside compute. Three small
all_reduces in the loss (``parallel_loss``). Layers that read one input reduce the sum of its
gradients once; with torch's ColwiseParallel, which runs such plans on a CPU, each layer reduces its
own. Not counted: sums over ranks of the gradients of norms and routers with ``sp``. Memory: paired
weights, the embedding and the head are cut; with ``sp`` activations between pairs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec, changed
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.cross_entropy import SOFTMAX
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.product_roles import (
    EXPERT_PRODUCTS,
    LINEAR_PRODUCTS,
    alias_weight_casts,
    weight_copies,
    weight_roles,
)
from itercast.compose.graph.rewrite import (
    StepBuilder,
    collective,
    fresh_storages,
    shard,
    with_tensors,
)
from itercast.compose.parallel.cuts import Cut, aligned_dim, cut_along, first_dim, result_dim
from itercast.compose.parallel.parallel_loss import LOSS, parallel_loss

PRODUCTS = (*LINEAR_PRODUCTS, *EXPERT_PRODUCTS, "aten.baddbmm.default")
WITH_BIAS = ("aten.addmm.default", "aten.baddbmm.default")
FACTOR_AXES = ({-1: "k", -2: "m", -3: "batch"}, {-1: "n", -2: "k", -3: "batch"})
RESULT_DIM = {"m": -2, "n": -1, "batch": -3}
Change = dict[TensorSpec, TensorSpec]


def tensor_parallel(
    capture: StepCapture, plan: ParallelPlan, *, summed: bool = True
) -> StepCapture:
    """Returns one rank's step; ValueError where heads do not divide or no pair of layers exists.

    ``summed``: layers that read one input add up its gradients before these are reduced.
    """
    if plan.tp == 1:
        return capture
    return _TensorParallel(capture, plan, summed).run()


class _TensorParallel:
    """Rewrites a step in one pass, and tracks which storages are cut, and how."""

    def __init__(self, capture: StepCapture, plan: ParallelPlan, summed: bool) -> None:
        self.capture, self.plan, self.tp, self.summed = capture, plan, plan.tp, summed
        if any(p.dtype == "uint8" for p in capture.parameters):
            raise ValueError(f"plan {str(plan)!r}: tp does not cut weights in 4 bits (QLoRA)")
        self.copy_of = weight_copies(capture)  # autocast's copy -> its weight
        self.roles = dict(_roles(capture, plan.expert_tp > 1))
        copies = {c: self.roles[w] for c, w in self.copy_of.items() if w in self.roles}
        self.roles |= copies
        if not self.roles:
            raise ValueError(
                f"plan {str(plan)!r}: tp needs pairs of linear layers, and the model has none"
            )
        self.parameters = {p.storage: p for p in capture.parameters}
        self.cuts: dict[int, Cut] = self._weight_cuts()
        self.copies: dict[tuple[int, bool], int] = {}  # gathered (activation, in backward) -> copy
        self.sources: dict[int, list[int]] = {}  # weight -> activations that it multiplies
        self.pending: dict[int, int] = {}  # activation -> column layers whose gradient is due
        self.lookups: set[int] = set()  # indices into tables cut by vocabulary
        self.events: dict[str, int] = {}  # host events of torch's DTensor, by name
        self.shards: dict[tuple[TensorSpec, int], TensorSpec] = {}  # many calls have each
        self.fresh = fresh_storages(capture)
        self.seq = capture.tokens // max(1, capture.samples)
        self.builder = StepBuilder(capture)

    def run(self) -> StepCapture:
        """The rewritten step; host events ``*_step`` of sharded parameters are DTensor's then."""
        for i, call in enumerate(self.capture.calls):
            if call.phase in ("optimizer", "zero_grad"):
                self.builder.add(i, call)
            elif call.op.startswith("aten.embedding"):
                self._embedding(i, call)
            elif call.op in PRODUCTS:
                self._product(i, call)
            else:
                self._other(i, call)
            for t in call.outputs:  # written anew
                self.copies.pop((t.storage, call.phase == "backward"), None)
        parameters = [self._parameter(p) for p in self.capture.parameters]
        step = self.builder.step(parameters)
        pairs = zip(parameters, self.capture.parameters, strict=True)
        sharded = sum(shard != whole for shard, whole in pairs)
        optimizers = [event.removesuffix("_step") for event in step.host if event.endswith("_step")]
        steps = {f"{optimizer}_dtensor_step": sharded for optimizer in optimizers}
        return replace(step, host={**step.host, **self.events, **steps})

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def _weight_cuts(self) -> dict[int, Cut]:
        """Cuts of weights and of the biases of layers cut by columns; tables by their rows."""
        cuts: dict[int, Cut] = {}
        for call in self.capture.calls:
            if call.op not in PRODUCTS or call.phase not in ("forward", "loss"):
                continue
            weight = call.args[2 if call.op in WITH_BIAS else 1]
            role = self.roles.get(weight.storage)
            if role is None:
                continue
            cuts[weight.storage] = cut_along(weight, -2 if role == "row" else -1)
            if call.op in WITH_BIAS and role != "row":
                cuts[call.args[0].storage] = cut_along(call.args[0], -1)
        cuts |= {weight: cuts[copy] for copy, weight in self.copy_of.items() if copy in cuts}
        tables = (p for s, p in self.parameters.items() if self.roles.get(s) == "vocabulary")
        return {p.storage: cut_along(_whole_parameter(p), 0) for p in tables} | cuts

    def _parameter(self, p: ParamSpec) -> ParamSpec:
        """A rank's shard of a parameter."""
        cut = self.cuts.get(p.storage)
        if cut is None or cut.tokens:
            return p
        return replace(p, shape=self._shard(_whole_parameter(p)).shape)

    def _dim(self, t: TensorSpec) -> int | None:
        """The dimension along which a rank holds a part of this tensor; None: it holds all."""
        cut = self.cuts.get(t.storage)
        return None if cut is None else first_dim(cut.dims(t), self.tp, cut.tokens)

    def _shard(self, t: TensorSpec) -> TensorSpec:
        """What a rank holds of a tensor."""
        dim = self._dim(t)
        return t if dim is None else self._cut(t, dim)

    def _cut(self, t: TensorSpec, dim: int) -> TensorSpec:
        """One rank's part of a tensor along a dimension."""
        if (t, dim) not in self.shards:
            self.shards[t, dim] = shard(t, dim, self.tp)
        return self.shards[t, dim]

    def _is_weight(self, t: TensorSpec) -> bool:
        return t.storage in self.parameters or t.storage in self.copy_of

    def _by_column(self, t: TensorSpec) -> bool:
        return t.storage in self.cuts and not self.cuts[t.storage].tokens

    def _send(self, message: OpCall, read: Sequence[TensorSpec], written: TensorSpec) -> None:
        """Adds a collective that reads and writes these tensors of the rank."""
        self.builder.calls.append(replace(message, args=tuple(read), outputs=(written,)))

    def _reduce(self, t: TensorSpec, phase: str) -> None:
        """Adds up partial sums: whole on every rank, or with sp each rank's tokens.

        The last call made ``t``; with sp it makes a temporary copy instead.
        """
        self.cuts.pop(t.storage, None)
        if not self.plan.sp:
            self._send(collective("all_reduce", "tp", t, phase), [t], t)
            return
        token_dim = -2 if len(t.shape) < 3 else 1
        divides = self.seq > 1 and not t.shape[token_dim] % self.seq
        length = self.seq if divides else 0
        self.cuts[t.storage] = cut_along(t, token_dim, length=length, tokens=True)
        partial = changed(t, storage=next(self.fresh))
        self.builder.calls[-1] = with_tensors(self.builder.calls[-1], {t: partial})
        message = collective("reduce_scatter", "tp", partial, phase)
        self._send(message, [partial], self._shard(t))

    def _gather(self, t: TensorSpec, phase: str) -> TensorSpec:
        """All tokens of an activation cut by tokens, gathered once in forward and in backward.

        What forward gathered is not saved: backward gathers it again, beside compute.
        """
        if t.storage not in self.cuts or not self.cuts[t.storage].tokens:
            return t
        backward = phase == "backward"
        key = (t.storage, backward)
        if key not in self.copies:
            self.copies[key] = next(self.fresh)
            whole = changed(t, storage=self.copies[key])
            again = backward and (t.storage, False) in self.copies
            message = collective("all_gather", "tp", whole, phase, overlaps_next=again)
            self._send(message, [whole, self._shard(t)], whole)
        return changed(t, storage=self.copies[key])

    def _embedding(self, i: int, call: OpCall) -> None:
        """Cuts a look-up in a table by vocabulary, or its gradient; others get all tokens."""
        out, indices = call.outputs[0], call.args[1].storage
        if call.op == "aten.embedding.default":
            cut = self.roles.get(call.args[0].storage) == "vocabulary"
            if not cut:
                self._other(i, call)
                return
            self._count("tp_product")
            self.lookups.add(indices)
            self.builder.add(i, with_tensors(call, {call.args[0]: self._cut(call.args[0], 0)}))
            self._reduce(out, call.phase)
            return
        change = {call.args[0]: self._gather(call.args[0], call.phase)}
        if indices in self.lookups:
            self.cuts[out.storage] = cut_along(out, 0)
            change[out] = self._cut(out, 0)
        self.builder.add(i, with_tensors(call, change))

    def _product(self, i: int, call: OpCall) -> None:
        """Cuts a product as its factors are, and reduces it where the summed dimension is cut."""
        first = 1 if call.op in WITH_BIAS else 0
        factors, out = call.args[first : first + 2], call.outputs[0]
        if call.phase in ("forward", "loss"):
            self._note_layer(call, *factors)
        by_column = any(map(self._by_column, factors))
        change: Change = {t: self._gather(t, call.phase) for t in factors if by_column}
        axis, source, dim = self._product_axis(call, [change.get(t, t) for t in factors])
        for t, axes in zip(factors, FACTOR_AXES, strict=True):
            for d, name in axes.items():
                if name == axis and len(t.shape) >= -d:
                    change[t] = self._cut(change.get(t, t), d)
        if source is not None and axis in RESULT_DIM:
            self._cut_result(call, source, dim, out, RESULT_DIM[axis] % len(out.shape), change)
        self.builder.add(i, with_tensors(call, change))
        if axis == "k" and by_column:
            self._reduce_sums(call, factors[1], out)

    def _note_layer(self, call: OpCall, a: TensorSpec, weight: TensorSpec) -> None:
        """Notes a layer's input in forward; a weight cut by rows cuts the input by columns."""
        if not self._is_weight(weight):
            return
        role = self.roles.get(weight.storage)
        if role is None and self._by_column(a) and self._dim(a) == len(a.shape) - 1:
            role = self.roles[weight.storage] = "row"
            self.cuts[weight.storage] = cut_along(weight, -2)
        if role is None:
            return
        self._count("tp_product_bias" if call.op in WITH_BIAS else "tp_product")
        self.sources.setdefault(weight.storage, []).append(a.storage)
        if role != "row":
            self.pending[a.storage] = self.pending.get(a.storage, 0) + 1

    def _product_axis(
        self, call: OpCall, factors: Sequence[TensorSpec]
    ) -> tuple[str, TensorSpec | None, int]:
        """Finds which axis of a product is cut: (m, n, k or batch; the cut factor; its dimension).

        ("", None, 0) where no axis is cut.
        """
        cut_axes: dict[str, tuple[TensorSpec, int]] = {}
        for t, axes in zip(factors, FACTOR_AXES, strict=True):
            cut = self.cuts.get(t.storage)
            if cut is None:
                continue
            dims = cut.dims(t)
            if cut.tokens:
                dims = [(d, n) for d, n in dims if d >= len(t.shape) - 2]  # no expert has all
            dim = first_dim(dims, self.tp, cut.tokens)
            if dim is not None:
                cut_axes.setdefault(axes[dim - len(t.shape)], (t, dim))
        activations = not any(map(self._is_weight, factors))
        is_attention = activations and call.op not in LINEAR_PRODUCTS
        if is_attention and "k" in cut_axes and self._by_column(cut_axes["k"][0]):
            raise self._heads_error(1)  # columns of the one head are cut
        if is_attention and "batch" in cut_axes:
            self._check_heads(*cut_axes["batch"])
        axis = next((name for name in ("batch", "m", "n", "k") if name in cut_axes), "")
        return (axis, *cut_axes.get(axis, (None, 0)))

    def _cut_result(
        self, call: OpCall, t: TensorSpec, dim: int, out: TensorSpec, out_dim: int, change: Change
    ) -> None:
        """Cuts ``out`` along ``out_dim``, as input ``t`` is along ``dim``; notes it in ``change``.

        Inputs that have this dimension too, and are not cut yet, are cut along it.
        """
        if out.storage not in self.cuts:
            self.cuts[out.storage] = self.cuts[t.storage].moved(t, dim, out, out_dim)
        change[out] = self._cut(out, out_dim)
        for other in call.tensors():
            along = aligned_dim(call, other, out, out_dim)
            if other in change or along is None or other.storage in self.cuts:
                continue
            change[other] = self._cut(other, along)
            if other.storage in self.parameters and self._by_column(t):
                self.cuts[other.storage] = cut_along(other, along)

    def _reduce_sums(self, call: OpCall, weight: TensorSpec, out: TensorSpec) -> None:
        """Reduces partial sums: the result of a row-cut layer, or first layers' input gradient.

        That gradient is reduced once all layers that read the input have added to it (``pending``
        is 0).
        """
        sources = self.sources.get(weight.storage)
        if call.phase in ("forward", "loss") or not sources:
            self._reduce(out, call.phase)
            return
        source = sources.pop()
        self.pending[source] = self.pending.get(source, 1) - 1
        if self.pending[source] == 0 or not (self.summed or self.plan.sp):
            self._reduce(out, call.phase)

    def _other(self, i: int, call: OpCall) -> None:
        """Cuts a call between products as its inputs are cut; a cut by columns has precedence."""
        if not any(t.storage in self.cuts for t in call.tensors()):
            self.builder.add(i, call)
            return
        change: Change = {}
        inputs = sorted(call.tensors(), key=lambda t: not self._by_column(t))
        if call.op.startswith("itercast.sdpa"):
            change = {t: self._gather(t, call.phase) for t in inputs}
            inputs = [t for t in inputs if self._by_column(t)]
        dims = {t: dim for t in inputs if (dim := self._dim(t)) is not None}
        if call.op.startswith("itercast.sdpa"):
            for t, dim in dims.items():
                self._check_heads(t, dim)
        change |= {t: self._cut(t, dim) for t, dim in dims.items()}
        for out in call.outputs:
            if any(t.storage == out.storage for t in dims):  # a view, or in place
                change[out] = self._shard(out)
                continue
            for t, dim in dims.items():  # the first input with a dimension that the result has
                out_dim = result_dim(call, t, dim, out)
                if out_dim is not None:
                    self._cut_result(call, t, dim, out, out_dim, change)
                    break
        calls = [with_tensors(call, change)]
        by_vocabulary = any(self._by_column(t) and d == len(t.shape) - 1 for t, d in dims.items())
        if call.op in LOSS and by_vocabulary:
            calls = parallel_loss(call, change, self.fresh)
            if call.op == SOFTMAX:
                self._count("tp_loss")
        self.builder.calls += calls[:-1]
        self.builder.add(i, calls[-1])

    def _check_heads(self, t: TensorSpec, dim: int) -> None:
        """ValueError unless an attention's input, cut along ``dim``, is cut by whole heads.

        In a batched product heads may be one dimension with samples.
        """
        heads = dict(self.cuts[t.storage].dims(t))[dim]
        if dim != len(t.shape) - 3:
            raise self._heads_error(t.shape[-3])
        if heads % self.tp:
            raise self._heads_error(heads)

    def _heads_error(self, heads: int) -> ValueError:
        text = f"tp={self.tp} does not divide {heads} heads"
        return ValueError(f"plan {str(self.plan)!r}: {text}")


@cached_by_identity
def _roles(capture: StepCapture, experts: bool) -> dict[int, str]:
    """``weight_roles`` by storage of a step, of experts' weights too if ``experts``."""
    return weight_roles(alias_weight_casts(capture), experts=experts)


def _whole_parameter(p: ParamSpec) -> TensorSpec:
    return TensorSpec(shape=p.shape, dtype=p.dtype, storage=p.storage)
