"""A rank's layers with prices: what every plan with the same cuts (tp, cp, ep) shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from compose.graph.identity_cache import remembered
from compose.graph.layers import Layer
from compose.parallel.plan import ParallelPlan
from compose.pricing.collectives import Cluster, price_messages
from compose.pricing.gradient_buckets import default_contention
from compose.pricing.gradient_copies import ADDED, parameter_extras
from compose.pricing.host import PYTHON, Launches, host_cost, launch_costs, python_op
from compose.pricing.price_book import Priceable, PriceBook, PricedOp
from compose.pricing.rank_graph import Cut, Frame, frame
from compose.pricing.work import Step, Work, fold, side_by_side_us
from microbench.opcall import OpCall, StepCapture

ATTENTION = ("itercast.sdpa", "aten.bmm.default", "aten._softmax.default", "aten.baddbmm.default")


@dataclass(frozen=True, kw_only=True)
class PricedLayer:
    """A layer's ops with durations, and by parameter what synchronising it may add.

    ``saved_bytes`` is what forward leaves for backward, after recomputation. ``launches`` is what
    the host spends on each op.
    """

    layer: Layer
    forward: tuple[PricedOp, ...]
    backward: tuple[PricedOp, ...]
    accumulate: tuple[PricedOp, ...]  # onto an earlier micro-batch's gradient
    into_bucket: tuple[PricedOp, ...]
    out_of_bucket: tuple[PricedOp, ...]
    launches: Launches
    on_cpu: bool
    saved_bytes: int
    matmul_s: float  # its matrix products at peak, forward and backward, recomputation left out
    weight_us: float  # backward's part that makes gradients of weights

    @property
    def numbered(self) -> bool:
        """Whether it is one of a list of modules: what FSDP shards and recompute wraps."""
        return self.layer.name not in ("first", "last")

    def fold(self, ops: Sequence[PricedOp]) -> Work:
        """Ops in a row as one number."""
        return fold([self._step(op) for op in ops], self.on_cpu)

    def _step(self, op: PricedOp) -> Step:
        if op.phase == PYTHON:
            return Step(0.0, op.duration_us)
        launch_us = self.launches.us(op, added=op.phase == ADDED)
        return Step(op.duration_us, launch_us, op.phase == "comm", self.launches.kernels(op))

    @cached_property
    def forward_work(self) -> Work:
        """Forward of one micro-batch."""
        return self.fold(self.forward)

    @cached_property
    def backward_work(self) -> Work:
        """Backward of one micro-batch, nothing synchronised."""
        return self.fold(self.backward)

    @cached_property
    def later_work(self) -> Work:
        """Backward of any micro-batch but the first."""
        return self.backward_work.then(self.fold(self.accumulate))

    @cached_property
    def into_work(self) -> Work:
        """All gradients into their bucket."""
        return self.fold(self.into_bucket)

    @cached_property
    def out_work(self) -> Work:
        """All parameters or gradients out of theirs."""
        return self.fold(self.out_of_bucket)


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """All layers of one rank's share, and what the optimizer does to it."""

    layers: tuple[PricedLayer, ...]
    frame: Frame
    host_us: float  # all of the step, one micro-batch
    optimizer_host_us: float  # Python of the optimizer, where there is no device to hide it
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)  # runs plans share

    @property
    def optimizer_tensors(self) -> int:
        """Parameters that the captured optimizer updates."""
        return sum(p.ready_after >= 0 for p in self.frame.capture.parameters)

    @property
    def update_share(self) -> float:
        """Bytes that the optimizer makes and drops again, by byte of gradients."""
        trained = sum(p.nbytes for p in self.frame.capture.parameters if p.ready_after >= 0)
        return self.frame.update_bytes / trained if trained else 0.0


def price_model(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, where: Cluster
) -> PricedModel:
    """The step of one micro-batch, cut and priced; ``capture`` has a rank's share of tokens.

    Remembered by what of the plan and its placement changes these prices.
    """
    groups = tuple(where.groups[axis] for axis in ("tp", "cp", "ep"))
    own = (Cut.of(plan), plan.recompute, plan.overlap * ("overlap" in plan.coconet))
    node = where.node.name if where.node else ""
    known = _models(capture)
    key = (own, groups, node, book)
    if key not in known:
        known[key] = _price_frame(frame(capture, plan, book.gpu), plan, book, where)
    return known[key]


@remembered
def _models(capture: StepCapture) -> dict[object, PricedModel]:
    return {}


def _price_frame(found: Frame, plan: ParallelPlan, book: PriceBook, where: Cluster) -> PricedModel:
    extras = [parameter_extras(x, found.step_bytes, book.gpu) for x in found.layers]
    ahead = [w for kinds in extras for one in kinds for w in one]
    book.ask([*found.wanted.values(), *ahead])  # one question for all of them
    ops = _price_calls(found, plan, book, where)
    steps = {k: n for k, n in found.capture.host.items() if k.endswith("_step")}
    others = {k: n for k, n in found.capture.host.items() if k not in steps}
    costs = launch_costs(found.capture, others, book)
    optimizer_us = host_cost(steps, book).duration_us if steps else 0.0
    layers = tuple(
        _price_layer(x, found, ops, added, plan, book, costs)
        for x, added in zip(found.layers, extras, strict=True)
    )
    update = [op for op, c in zip(ops, found.capture.calls, strict=True) if c.phase == "optimizer"]
    launched_us = sum(map(costs.us, update)) + sum(
        x.count * sum(map(costs.us, [*ops[slice(*x.forward)], *ops[slice(*x.backward)]]))
        for x in found.layers
    )
    parameters = found.capture.parameters
    tensors = sum(x.count * len(x.parameters) for x in found.layers) / max(1, len(parameters))
    return PricedModel(
        layers=layers,
        frame=found,
        host_us=launched_us + optimizer_us * tensors,
        optimizer_host_us=optimizer_us,
    )


def _price_calls(
    found: Frame, plan: ParallelPlan, book: PriceBook, where: Cluster
) -> list[PricedOp]:
    """Calls and collectives, what of these is hidden taken off."""
    messages = price_messages(list(found.messages.values()), book, where)
    ops = dict(zip(found.messages, messages, strict=True))
    ops |= dict(zip(found.wanted, book.price(list(found.wanted.values())), strict=True))
    calls = found.capture.calls
    for i in found.messages:
        ops[i] = _exposed(i, calls[i], ops, plan, default_contention(book.gpu))
    return [ops[i] for i in range(len(calls))]


def _exposed(
    i: int, call: OpCall, ops: dict[int, PricedOp], plan: ParallelPlan, contention: float
) -> PricedOp:
    """A collective's time beside compute: behind the next op, or in chunks with the one before.

    In C chunks a product and its collective take T/C and then (C-1)/C T beside t (CoCoNeT).
    """
    op = ops[i]
    us = op.duration_us
    if call.kwargs["behind"] and i + 1 in ops:
        next_us = ops[i + 1].duration_us
        us = side_by_side_us(next_us, us, contention) - next_us
    elif "overlap" in plan.coconet and call.kwargs["axis"] == "tp" and i:
        rest_us = (plan.overlap - 1) / plan.overlap * ops[i - 1].duration_us
        us = side_by_side_us(rest_us, us, contention) - rest_us
    scale = us / op.duration_us if op.duration_us else 0.0
    return replace(op, duration_us=us, low_us=op.low_us * scale, high_us=op.high_us * scale)


def _price_layer(
    layer: Layer,
    found: Frame,
    ops: Sequence[PricedOp],
    extras: Sequence[Sequence[Priceable]],
    plan: ParallelPlan,
    book: PriceBook,
    costs: Launches,
) -> PricedLayer:
    forward, backward = (ops[a:b] for a, b in (layer.forward, layer.backward))
    again, saved = list[PricedOp](), layer.saved_bytes
    if plan.recompute and layer.name not in ("first", "last"):
        again, saved = _recomputed(layer, found.capture, ops, plan)
    if again:
        again = [python_op("checkpoint_layer", _saved(layer, found.capture), book), *again]
        shift = len(again)
        moved = tuple(
            replace(p, ready_after=p.ready_after + shift) if p.ready_after >= 0 else p
            for p in layer.parameters
        )
        layer = replace(layer, parameters=moved)
    accumulate, into, out = (book.price(one) for one in extras)
    spans = (layer.forward, layer.backward)
    return PricedLayer(
        layer=layer,
        forward=tuple(forward),
        backward=(*again, *backward),
        accumulate=tuple(accumulate),
        into_bucket=tuple(into),
        out_of_bucket=tuple(out),
        launches=costs,
        on_cpu=book.gpu.kind == "cpu",
        saved_bytes=saved,
        matmul_s=sum(found.matmul_s[i] for a, b in spans for i in range(a, b)),
        weight_us=_weight_us(layer, found.capture, ops),
    )


def _recomputed(
    layer: Layer, capture: StepCapture, ops: Sequence[PricedOp], plan: ParallelPlan
) -> tuple[list[PricedOp], int]:
    """What backward does again first, and the bytes that are still saved.

    full: the layer from its input up to the last result that its backward reads (torch.utils
    .checkpoint stops there). selective: attention only (arXiv:2205.05198).
    """
    a, b = layer.forward
    if plan.recompute == "full":
        read = {t.storage for c in capture.calls[slice(*layer.backward)] for t in c.tensors()}
        needed = (
            i + 1 for i in range(a, b) if any(t.storage in read for t in capture.calls[i].outputs)
        )
        return list(ops[a : max(needed, default=a)]), layer.output_bytes
    chosen = [i for i in range(a, b) if capture.calls[i].op in ATTENTION]
    if not chosen:
        return [], layer.saved_bytes
    weights = {p.storage for p in layer.parameters}
    chosen = [
        i
        for i in range(chosen[0], chosen[-1] + 1)
        if not any(t.storage in weights for t in capture.calls[i].tensors())
    ]
    dropped = sum(t.nbytes for i in chosen for t in capture.calls[i].outputs)
    return [ops[i] for i in chosen], max(layer.output_bytes, layer.saved_bytes - dropped)


def _saved(layer: Layer, capture: StepCapture) -> int:
    """How many tensors autograd saves of a layer: what backward's calls read of forward's."""
    forward = capture.calls[slice(*layer.forward)]
    there = {t.storage for c in forward for t in (*c.tensors(), *c.outputs)}
    backward = capture.calls[slice(*layer.backward)]
    return max(1, sum(t.storage in there for c in backward for t in c.tensors()))


def _weight_us(layer: Layer, capture: StepCapture, ops: Sequence[PricedOp]) -> float:
    """Time of backward's products whose result has a weight's shape: gradients nobody waits for."""
    shapes = {p.shape for p in layer.parameters if len(p.shape) > 1}
    a, b = layer.backward
    return sum(
        ops[i].duration_us
        for i in range(a, b)
        if capture.calls[i].op in ("aten.mm.default", "aten.bmm.default")
        and capture.calls[i].outputs[0].shape in shapes
    )
