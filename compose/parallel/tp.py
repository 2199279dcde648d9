"""Tensor parallelism of any captured model, after Megatron-LM (arXiv:1909.08053, 2205.05198).

Linear layers come in pairs: the first is cut by columns, the second by rows (``product_roles``).
Added: an all_reduce of the second's output in forward, and of the first's input gradient in
backward. With ``sp`` each becomes a reduce_scatter, with an all_gather before the next pair, and
backward gathers the inputs of first layers once more, beside compute. Three small all_reduces in
the loss (``parallel_loss``). Layers that read one input reduce the sum of its gradients once; with
torch's ColwiseParallel, which runs such plans on a CPU, each layer reduces its own. Memory: paired
weights, the embedding and the head are cut; with ``sp`` activations between pairs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compose.graph.product_roles import (
    DTYPE_CAST,
    LINEAR_PRODUCTS,
    alias_weight_casts,
    weight_roles,
)
from compose.graph.rewrite import StepBuilder, collective, fresh_storages, shard, with_tensors
from compose.parallel.parallel_loss import LOSS, parallel_loss
from compose.parallel.plan import ParallelPlan
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec


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
    """Rewrites a step in one pass; keeps track of which storages are cut, and how."""

    def __init__(self, capture: StepCapture, plan: ParallelPlan, summed: bool) -> None:
        capture = alias_weight_casts(capture)
        self.capture, self.plan, self.tp, self.summed = capture, plan, plan.tp, summed
        self.roles = weight_roles(capture)
        if not self.roles:
            raise ValueError(
                f"plan {str(plan)!r}: tp needs pairs of linear layers, and the model has none"
            )
        self.parameters = {p.storage: p for p in capture.parameters}
        self.by_column: set[int] = set()  # activations cut by columns or heads
        self.by_token: set[int] = set()  # activations cut by tokens, with sp
        self.gathered: set[int] = set()  # of these: whole again
        self.gathered_in_backward: set[int] = set()
        self.inputs: dict[int, list[int]] = {}  # activation -> weights that multiply it
        self.pending: dict[int, int] = {}  # activation -> column layers whose gradient is due
        attention = [c for c in capture.calls if c.op.startswith("itercast.sdpa")]
        self.heads = {t.shape[1] for c in attention for t in c.tensors()}
        self.events: dict[str, int] = {}  # host events of torch's DTensor, by name
        self.fresh = fresh_storages(capture)
        self.tokens = capture.tokens or capture.samples
        self.seq = capture.tokens // max(1, capture.samples)
        self.made = StepBuilder(capture)

    def run(self) -> StepCapture:
        """The rewritten step."""
        for i, call in enumerate(self.capture.calls):
            if call.phase in ("optimizer", "zero_grad"):
                self.made.add(i, call)
            elif call.op.startswith("aten.embedding") and self._embedding(i, call):
                continue
            elif call.op in LINEAR_PRODUCTS:
                self._product(i, call)
            elif call.op == DTYPE_CAST and call.args[0].storage in self.roles:
                self.made.add(i, self._cast(call))
            else:
                self._other(i, call)
        parameters = [self._parameter(p) for p in self.capture.parameters]
        step = self.made.step(parameters)
        pairs = zip(parameters, self.capture.parameters, strict=True)
        sharded = sum(a != b for a, b in pairs)
        steps = {f"{k[:-5]}_dtensor_step": sharded for k in step.host if k.endswith("_step")}
        return replace(step, host={**step.host, **self.events, **steps})

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def _parameter(self, p: ParamSpec) -> ParamSpec:
        """A rank's shard of a parameter; a weight's rows are outputs, its columns inputs."""
        role = self.roles.get(p.storage)
        if role is None and p.storage in self._biases():
            role = "column"
        if role is None:
            return p
        dim = 1 if role == "row" else 0
        shape = tuple(-(-n // self.tp) if d == dim else n for d, n in enumerate(p.shape))
        return replace(p, shape=shape)

    def _biases(self) -> set[int]:
        """Storages of the biases of layers cut by columns."""
        return {
            c.args[0].storage
            for c in self.capture.calls
            if c.op == "aten.addmm.default" and self.roles.get(c.args[2].storage) == "column"
        }

    def _send(self, kind: str, t: TensorSpec, phase: str, *, overlaps_next: bool = False) -> None:
        self.made.calls.append(collective(kind, "tp", t, phase, overlaps_next=overlaps_next))

    def _reduce(self, t: TensorSpec, phase: str) -> None:
        """Adds up partial sums: whole on every rank, or with sp each rank's tokens."""
        self._send("reduce_scatter" if self.plan.sp else "all_reduce", t, phase)
        self.by_column.discard(t.storage)
        if self.plan.sp:
            self.by_token.add(t.storage)

    def _gather(self, t: TensorSpec, phase: str) -> None:
        """Gathers all tokens of an activation cut by tokens, once."""
        key = t.storage
        if key in self.by_token and key not in self.gathered:
            self.gathered.add(key)
            self._send("all_gather", t, phase)

    def _embedding(self, i: int, call: OpCall) -> bool:
        """Cuts a look-up in a table cut by vocabulary, or its gradient; false for other tables."""
        forward = call.op == "aten.embedding.default"
        if forward:
            if self.roles.get(call.args[0].storage) != "vocabulary":
                return False
            self._count("tp_product")
            self.made.add(i, with_tensors(call, {call.args[0]: shard(call.args[0], 0, self.tp)}))
            self._reduce(call.outputs[0], call.phase)
            return True
        tables = {p.shape for p in self.parameters.values() if p.storage in self.roles}
        out = call.outputs[0]
        if out.shape not in tables:
            return False
        self._gather(call.args[0], call.phase)
        self.made.add(i, with_tensors(call, {out: shard(out, 0, self.tp)}))
        return True

    def _product(self, i: int, call: OpCall) -> None:
        """Cuts a product: of forward, of an input's gradient or of a weight's gradient."""
        a, b = call.args[-2:]
        out, weight = call.outputs[0], b if b.storage in self.roles else None
        if call.phase in ("forward", "loss") and weight is not None:
            self._forward(i, call, a, weight)
        elif weight is not None:
            self._input_gradient(i, call, a, weight)
        elif call.phase == "backward":
            role = self._weight_role(b, out)
            if role is not None:
                self._gather(a if role == "row" else b, call.phase)
                self.made.add(i, self._weight_gradient(call, role))
            else:
                self._other(i, call)
        else:
            self._other(i, call)

    def _forward(self, i: int, call: OpCall, a: TensorSpec, weight: TensorSpec) -> None:
        """Cuts out = a @ weight and sends what its role asks for."""
        self.inputs.setdefault(a.storage, []).append(weight.storage)
        self._count("tp_product_bias" if call.op == "aten.addmm.default" else "tp_product")
        out = call.outputs[0]
        if self.roles[weight.storage] == "row":
            change = {a: shard(a, -1, self.tp), weight: shard(weight, 0, self.tp)}
            self.made.add(i, with_tensors(call, change))
            self._reduce(out, call.phase)
            return
        self._gather(a, call.phase)
        self.pending[a.storage] = self.pending.get(a.storage, 0) + 1
        change = {t: shard(t, -1, self.tp) for t in (*call.args[:-2], weight, out)}
        self.made.add(i, with_tensors(call, change))
        self.by_column.add(out.storage)

    def _input_gradient(self, i: int, call: OpCall, a: TensorSpec, weight: TensorSpec) -> None:
        """Cuts the gradient of a layer's input: a @ weight, ``a`` the output's gradient."""
        out = call.outputs[0]
        if self.roles[weight.storage] == "row":
            self._gather(a, call.phase)
            change = {weight: shard(weight, -1, self.tp), out: shard(out, -1, self.tp)}
            self.made.add(i, with_tensors(call, change))
            self.by_column.add(out.storage)
            return
        change = {a: shard(a, -1, self.tp), weight: shard(weight, 0, self.tp)}
        self.made.add(i, with_tensors(call, change))
        source = next((s for s, w in self.inputs.items() if weight.storage in w), -1)
        self.pending[source] = self.pending.get(source, 1) - 1
        if self.pending[source] == 0 or not self.summed:
            self._reduce(out, call.phase)

    def _weight_role(self, b: TensorSpec, out: TensorSpec) -> str | None:
        """Returns the role of the weight whose gradient ``out`` is; ``b`` is the saved input."""
        shapes = (out.shape, out.shape[::-1])
        for storage in self.inputs.get(b.storage, []):
            if self.parameters[storage].shape in shapes:
                return self.roles[storage]
        return None

    def _cast(self, call: OpCall) -> OpCall:
        """Cuts autocast's copy of a weight like the weight itself."""
        dim = 1 if self.roles[call.args[0].storage] == "row" else 0
        return with_tensors(
            call, {t: shard(t, dim, self.tp) for t in (call.args[0], *call.outputs)}
        )

    def _weight_gradient(self, call: OpCall, role: str) -> OpCall:
        """Cuts the gradient of a weight: a @ b, ``b`` the layer's saved input."""
        a, b = call.args[-2:]
        out = call.outputs[0]
        self.by_column.add(out.storage)  # a cast may follow
        if role == "row":
            return with_tensors(call, {b: shard(b, -1, self.tp), out: shard(out, -1, self.tp)})
        if self.plan.sp and b.storage not in self.gathered_in_backward:
            self.gathered_in_backward.add(b.storage)  # gathered again, beside the product
            self._send("all_gather", b, call.phase, overlaps_next=True)
        return with_tensors(call, {a: shard(a, 0, self.tp), out: shard(out, 0, self.tp)})

    def _other(self, i: int, call: OpCall) -> None:
        """Cuts a call between linear layers as its inputs are cut."""
        inputs = call.tensors()
        if call.op.startswith("itercast.sdpa"):
            self._check_heads(inputs)
        if any(t.storage in self.by_column for t in inputs):
            change = {t: self._column_shard(t) for t in inputs if t.storage in self.by_column}
            for t in call.outputs:
                if t.numel > 1:
                    change[t] = self._column_shard(t)
                    self.by_column.add(t.storage)
        elif any(t.storage in self.by_token and t.storage not in self.gathered for t in inputs):
            change = {t: self._token_shard(t) for t in (*inputs, *call.outputs)}
            self.by_token |= {t.storage for t in call.outputs if change[t] != t}
        else:
            change = {}
        calls = [with_tensors(call, change)]
        if change and call.op in LOSS:
            calls = parallel_loss(call, change, self.fresh)
            if call.op == LOSS[0]:
                self._count("tp_loss")
        self.made.calls += calls[:-1]
        self.made.add(i, calls[-1])

    def _check_heads(self, tensors: Sequence[TensorSpec]) -> None:
        for t in tensors:
            if t.storage in self.by_column and t.shape[1] % self.tp:
                text = f"tp={self.tp} does not divide {t.shape[1]} heads"
                raise ValueError(f"plan {str(self.plan)!r}: {text}")

    def _column_shard(self, t: TensorSpec) -> TensorSpec:
        """Cut by heads where a dimension counts them, else along the last dimension."""
        if len(t.shape) > 3:
            for dim in range(1, len(t.shape)):
                if t.shape[dim] in self.heads:
                    return shard(t, dim, self.tp)
        return shard(t, -1, self.tp)

    def _token_shard(self, t: TensorSpec) -> TensorSpec:
        """Cut along the first dimension that counts tokens; whole where none does."""
        for dim, n in enumerate(t.shape):
            if n in (self.seq, self.tokens) and n > 1 and t.storage not in self.parameters:
                return shard(t, dim, self.tp)
        return t
