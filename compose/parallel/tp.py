"""Tensor parallelism of any captured model, after Megatron-LM (arXiv:1909.08053, 2205.05198).

Adds: all_reduce of the output of every second product of a pair in forward and of the input
gradient of the first in backward; with ``sp`` an all_gather before the first and a reduce_scatter
after the second instead, and one more all_gather in backward behind compute; three small
all_reduces in the loss (``parallel_loss``). Products of one input reduce their gradients' sum; on a
CPU, where torch's ColwiseParallel runs the plan, each reduces its own. Memory: parameters
of paired products, the embedding and the head are cut; with ``sp`` activations between pairs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compose.graph.product_roles import CAST, PRODUCTS, casts_as_weights, roles
from compose.graph.rewrite import Builder, changed, collective, cut, fresh_storages
from compose.parallel.parallel_loss import LOSS, parallel_loss
from compose.parallel.plan import ParallelPlan
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec


def tensor_parallel(
    capture: StepCapture, plan: ParallelPlan, *, summed: bool = True
) -> StepCapture:
    """One rank's step; ValueError where heads do not divide or nothing can be cut.

    ``summed``: products of one input add their gradients of it before these are reduced.
    """
    if plan.tp == 1:
        return capture
    return _TensorParallel(capture, plan, summed).run()


class _TensorParallel:
    """One walk over the step: which storages are parts, and what is sent."""

    def __init__(self, capture: StepCapture, plan: ParallelPlan, summed: bool) -> None:
        capture = casts_as_weights(capture)
        self.capture, self.plan, self.tp, self.summed = capture, plan, plan.tp, summed
        self.roles = roles(capture)
        if not self.roles:
            raise ValueError(f"plan {str(plan)!r}: no pair of products found to cut by tp")
        self.parameters = {p.storage: p for p in capture.parameters}
        self.parts: set[int] = set()  # cut by columns or heads
        self.pieces: set[int] = set()  # cut by tokens, under sp
        self.gathered: set[int] = set()
        self.again: set[int] = set()  # gathered in backward
        self.inputs: dict[int, list[int]] = {}  # activation -> weights that multiply it
        self.pending: dict[int, int] = {}  # activation -> column products whose gradient is due
        attention = [c for c in capture.calls if c.op.startswith("itercast.sdpa")]
        self.heads = {t.shape[1] for c in attention for t in c.tensors()}
        self.events: dict[str, int] = {}  # what torch's DTensor does in Python
        self.fresh = fresh_storages(capture)
        self.tokens = capture.tokens or capture.samples
        self.seq = capture.tokens // max(1, capture.samples)
        self.made = Builder(capture)

    def run(self) -> StepCapture:
        """The rewritten step."""
        for i, call in enumerate(self.capture.calls):
            if call.phase in ("optimizer", "zero_grad"):
                self.made.keep(i, call)
            elif call.op.startswith("aten.embedding") and self._vocabulary(i, call):
                continue
            elif call.op in PRODUCTS:
                self._product(i, call)
            elif call.op == CAST and call.args[0].storage in self.roles:
                self.made.keep(i, self._cast(call))
            else:
                self._other(i, call)
        parameters = [self._parameter(p) for p in self.capture.parameters]
        made = self.made.done(parameters)
        pairs = zip(parameters, self.capture.parameters, strict=True)
        cut_ones = sum(a != b for a, b in pairs)
        steps = {f"{k[:-5]}_dtensor_step": cut_ones for k in made.host if k.endswith("_step")}
        return replace(made, host={**made.host, **self.events, **steps})

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def _parameter(self, p: ParamSpec) -> ParamSpec:
        """A weight's rows are outputs: cut by column or vocabulary they are fewer."""
        role = self.roles.get(p.storage)
        if role is None and p.storage in self._biases():
            role = "column"
        if role is None:
            return p
        dim = 1 if role == "row" else 0
        shape = tuple(-(-n // self.tp) if d == dim else n for d, n in enumerate(p.shape))
        return replace(p, shape=shape)

    def _biases(self) -> set[int]:
        return {
            c.args[0].storage
            for c in self.capture.calls
            if c.op == "aten.addmm.default" and self.roles.get(c.args[2].storage) == "column"
        }

    def _send(self, kind: str, t: TensorSpec, phase: str, *, behind: bool = False) -> None:
        self.made.calls.append(collective(kind, "tp", t, phase, behind=behind))

    def _reduce(self, t: TensorSpec, phase: str) -> None:
        """Partial sums become one: whole on every rank, or each rank's tokens."""
        self._send("reduce_scatter" if self.plan.sp else "all_reduce", t, phase)
        self.parts.discard(t.storage)
        if self.plan.sp:
            self.pieces.add(t.storage)

    def _whole(self, t: TensorSpec, phase: str) -> None:
        """All tokens of an activation, gathered once in each phase."""
        key = t.storage
        if key in self.pieces and key not in self.gathered:
            self.gathered.add(key)
            self._send("all_gather", t, phase)

    def _vocabulary(self, i: int, call: OpCall) -> bool:
        """A look-up in, or the gradient of, a table cut by rows; false where it is not cut."""
        forward = call.op == "aten.embedding.default"
        if forward:
            if self.roles.get(call.args[0].storage) != "vocabulary":
                return False
            self._count("tp_product")
            self.made.keep(i, changed(call, {call.args[0]: cut(call.args[0], 0, self.tp)}))
            self._reduce(call.outputs[0], call.phase)
            return True
        tables = {p.shape for p in self.parameters.values() if p.storage in self.roles}
        out = call.outputs[0]
        if out.shape not in tables:
            return False
        self._whole(call.args[0], call.phase)
        self.made.keep(i, changed(call, {out: cut(out, 0, self.tp)}))
        return True

    def _product(self, i: int, call: OpCall) -> None:
        a, b = call.args[-2:]
        out, weight = call.outputs[0], b if b.storage in self.roles else None
        if call.phase in ("forward", "loss") and weight is not None:
            self._forward(i, call, a, weight)
        elif weight is not None:
            self._input_gradient(i, call, a, weight)
        elif call.phase == "backward":
            role = self._weight_role(b, out)
            if role is not None:
                self._whole(a if role == "row" else b, call.phase)
                self.made.keep(i, self._weight_gradient(call, role))
            else:
                self._other(i, call)
        else:
            self._other(i, call)

    def _forward(self, i: int, call: OpCall, a: TensorSpec, weight: TensorSpec) -> None:
        self.inputs.setdefault(a.storage, []).append(weight.storage)
        self._count("tp_product_bias" if call.op == "aten.addmm.default" else "tp_product")
        out = call.outputs[0]
        if self.roles[weight.storage] == "row":
            change = {a: cut(a, -1, self.tp), weight: cut(weight, 0, self.tp)}
            self.made.keep(i, changed(call, change))
            self._reduce(out, call.phase)
            return
        self._whole(a, call.phase)
        self.pending[a.storage] = self.pending.get(a.storage, 0) + 1
        change = {t: cut(t, -1, self.tp) for t in (*call.args[:-2], weight, out)}
        self.made.keep(i, changed(call, change))
        self.parts.add(out.storage)

    def _input_gradient(self, i: int, call: OpCall, a: TensorSpec, weight: TensorSpec) -> None:
        out = call.outputs[0]
        if self.roles[weight.storage] == "row":
            self._whole(a, call.phase)
            change = {weight: cut(weight, -1, self.tp), out: cut(out, -1, self.tp)}
            self.made.keep(i, changed(call, change))
            self.parts.add(out.storage)
            return
        change = {a: cut(a, -1, self.tp), weight: cut(weight, 0, self.tp)}
        self.made.keep(i, changed(call, change))
        source = next((s for s, w in self.inputs.items() if weight.storage in w), -1)
        self.pending[source] = self.pending.get(source, 1) - 1
        if self.pending[source] == 0 or not self.summed:
            self._reduce(out, call.phase)

    def _weight_role(self, b: TensorSpec, out: TensorSpec) -> str | None:
        """How the weight is cut whose gradient this is: the saved input names it."""
        shapes = (out.shape, out.shape[::-1])
        for storage in self.inputs.get(b.storage, []):
            if self.parameters[storage].shape in shapes:
                return self.roles[storage]
        return None

    def _cast(self, call: OpCall) -> OpCall:
        """Of a weight that is cut, or of nothing else in its storage."""
        dim = 1 if self.roles[call.args[0].storage] == "row" else 0
        return changed(call, {t: cut(t, dim, self.tp) for t in (call.args[0], *call.outputs)})

    def _weight_gradient(self, call: OpCall, role: str) -> OpCall:
        a, b = call.args[-2:]
        out = call.outputs[0]
        self.parts.add(out.storage)  # a cast may follow
        if role == "row":
            return changed(call, {b: cut(b, -1, self.tp), out: cut(out, -1, self.tp)})
        if self.plan.sp and b.storage not in self.again:
            self.again.add(b.storage)  # its tokens are gathered again, behind the product
            self._send("all_gather", b, call.phase, behind=True)
        return changed(call, {a: cut(a, 0, self.tp), out: cut(out, 0, self.tp)})

    def _other(self, i: int, call: OpCall) -> None:
        """Calls between: parts stay parts, tokens stay where they are."""
        inputs = call.tensors()
        if call.op.startswith("itercast.sdpa"):
            self._check_heads(inputs)
        if any(t.storage in self.parts for t in inputs):
            change = {t: self._cut_part(t) for t in inputs if t.storage in self.parts}
            for t in call.outputs:
                if t.numel > 1:
                    change[t] = self._cut_part(t)
                    self.parts.add(t.storage)
        elif any(t.storage in self.pieces and t.storage not in self.gathered for t in inputs):
            change = {t: self._cut_piece(t) for t in (*inputs, *call.outputs)}
            self.pieces |= {t.storage for t in call.outputs if change[t] != t}
        else:
            change = {}
        calls = [changed(call, change)]
        if change and call.op in LOSS:
            calls = parallel_loss(call, change, self.fresh)
            if call.op == LOSS[0]:
                self._count("tp_loss")
        self.made.calls += calls[:-1]
        self.made.keep(i, calls[-1])

    def _check_heads(self, tensors: Sequence[TensorSpec]) -> None:
        for t in tensors:
            if t.storage in self.parts and t.shape[1] % self.tp:
                text = f"tp={self.tp} does not divide {t.shape[1]} heads"
                raise ValueError(f"plan {str(self.plan)!r}: {text}")

    def _cut_part(self, t: TensorSpec) -> TensorSpec:
        """By heads where a dimension counts them, else by the last dimension."""
        if len(t.shape) > 3:
            for dim in range(1, len(t.shape)):
                if t.shape[dim] in self.heads:
                    return cut(t, dim, self.tp)
        return cut(t, -1, self.tp)

    def _cut_piece(self, t: TensorSpec) -> TensorSpec:
        for dim, n in enumerate(t.shape):
            if n in (self.seq, self.tokens) and n > 1 and t.storage not in self.parameters:
                return cut(t, dim, self.tp)
        return t
