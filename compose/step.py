"""A rank's layers with prices: what every plan with the same cuts (tp, cp, ep) shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from compose.collectives import Cluster, Message, price_messages
from compose.context import context_parallel
from compose.ddp import default_contention
from compose.engines import launches
from compose.experts import expert_parallel
from compose.host import host_cost
from compose.layers import Layer, split_layers
from compose.plan import ParallelPlan
from compose.priced import Priceable, PriceBook, PricedOp, priceable
from compose.reuse import cold_fractions, cold_share
from compose.rewrite import COLLECTIVE
from compose.tensor import tensor_parallel
from compose.work import Step, Work, fold, side_by_side_us
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec

MATMUL_FAMILIES = {"gemm", "conv", "attention"}
ATTENTION = ("itercast.sdpa", "aten.bmm.default", "aten._softmax.default", "aten.baddbmm.default")


@dataclass(frozen=True, kw_only=True)
class PricedLayer:
    """A layer's ops with durations. ``extras`` by parameter: what synchronising it may add.

    ``saved_bytes`` is what forward leaves for backward, after recomputation.
    """

    layer: Layer
    forward: tuple[PricedOp, ...]
    backward: tuple[PricedOp, ...]
    accumulate: tuple[PricedOp, ...]  # onto an earlier micro-batch's gradient
    into_bucket: tuple[PricedOp, ...]
    out_of_bucket: tuple[PricedOp, ...]
    launch_us: float
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
        steps = [Step(op.duration_us, op.phase == "comm") for op in ops]
        return fold(steps, self.launch_us, self.on_cpu)

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
        return self.fold([*self.backward, *self.accumulate])


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """All layers of one rank's share, and what the optimizer does to it."""

    layers: tuple[PricedLayer, ...]
    optimizer: tuple[Priceable, ...]
    optimizer_tensors: int
    host_us: float  # all of the step, one micro-batch
    optimizer_host_us: float  # Python of the optimizer, where there is no device to hide it
    tied_bytes: int  # weights of the first layer that the last one uses too
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)  # runs plans share


def cuts(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """The rewrites that change what a rank computes, in the order in which they nest."""
    for rewrite in (expert_parallel, context_parallel, tensor_parallel):
        capture = rewrite(capture, plan)
    return capture


def price_model(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, where: Cluster
) -> PricedModel:
    """The step of one micro-batch, cut and priced; ``capture`` has a rank's share of tokens."""
    capture = cuts(capture, plan)
    ops, matmul_s = _price_calls(capture, plan, book, where)
    found = split_layers(capture)
    launch_us, optimizer_us = _host(capture, book)
    layers = tuple(
        replace(
            _price_layer(x, capture, ops, plan, book, launch_us),
            matmul_s=sum(matmul_s[i] for a, b in (x.forward, x.backward) for i in range(a, b)),
        )
        for x in found
    )
    optimizer = [c for c in capture.calls if c.phase == "optimizer"]
    calls = len(optimizer) + sum(
        x.count * (_length(x.forward) + _length(x.backward)) for x in found
    )
    tensors = sum(x.count * len(x.parameters) for x in found) / max(1, len(capture.parameters))
    return PricedModel(
        layers=layers,
        optimizer=tuple(priceable(c) for c in optimizer),
        optimizer_tensors=sum(p.ready_after >= 0 for p in capture.parameters),
        host_us=launch_us * calls + optimizer_us * tensors,
        optimizer_host_us=optimizer_us,
        tied_bytes=_tied_bytes(capture, found),
    )


def _tied_bytes(capture: StepCapture, layers: Sequence[Layer]) -> int:
    if len(layers) < 2:
        return 0
    a, b = layers[-1].forward
    used = {t.storage for call in capture.calls[a:b] for t in call.tensors()}
    return sum(p.nbytes for p in layers[0].parameters if p.storage in used)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _host(capture: StepCapture, book: PriceBook) -> tuple[float, float]:
    """Host time per op, and of the optimizer's Python for the captured parameters."""
    steps = {k: n for k, n in capture.host.items() if k.endswith("_step")}
    counts = {k: n for k, n in capture.host.items() if k not in steps}
    if book.gpu.kind != "cpu":
        counts["launch"] = launches(capture)
    rest = host_cost(counts, book.pricer, book.gpu, book.threads).duration_us
    own = host_cost(steps, book.pricer, book.gpu, book.threads).duration_us if steps else 0.0
    return rest / max(1, len(capture.calls)), own


def _price_calls(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, where: Cluster
) -> tuple[list[PricedOp], list[float]]:
    """Calls and collectives, what of these is hidden taken off; and seconds at peak of products."""
    cold = cold_fractions(capture, book.gpu)
    sent = [i for i, c in enumerate(capture.calls) if c.op == COLLECTIVE]
    messages = [_message(capture.calls[i]) for i in sent]
    priced = price_messages(messages, book, where)
    by_index = dict(zip(sent, priced, strict=True))
    computed = [i for i in range(len(capture.calls)) if i not in by_index]
    wanted = [priceable(capture.calls[i], cold[i]) for i in computed]
    ops = book.price(wanted)
    matmul_s = dict.fromkeys(range(len(capture.calls)), 0.0)
    for i, w in zip(computed, wanted, strict=True):
        if w.family is not None and w.family.name in MATMUL_FAMILIES:
            matmul_s[i] = float(w.family.flops(w.params)) / book.gpu.peak(w.params.dtype)
    by_index |= dict(zip(computed, ops, strict=True))
    for i in sent:
        by_index[i] = _exposed(i, capture.calls[i], by_index, plan, default_contention(book.gpu))
    return [by_index[i] for i in range(len(capture.calls))], list(matmul_s.values())


def _message(call: OpCall) -> Message:
    t, facts = call.args[0], call.kwargs
    return Message(
        kind=facts["kind"],
        axis=facts["axis"],
        message_bytes=round(t.nbytes * facts["scale"]),
        dtype=t.dtype,
        phase="comm",
    )


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
    capture: StepCapture,
    ops: Sequence[PricedOp],
    plan: ParallelPlan,
    book: PriceBook,
    launch_us: float,
) -> PricedLayer:
    forward, backward = (ops[a:b] for a, b in (layer.forward, layer.backward))
    again, saved = list[PricedOp](), layer.saved_bytes
    if plan.recompute and layer.name not in ("first", "last"):
        again, saved = _recomputed(layer, capture, ops, plan)
    if again:
        shift = len(again)
        moved = tuple(
            replace(p, ready_after=p.ready_after + shift) if p.ready_after >= 0 else p
            for p in layer.parameters
        )
        layer = replace(layer, parameters=moved)
    extras = [book.price([extra(p, book) for p in layer.parameters]) for extra in EXTRAS]
    return PricedLayer(
        layer=layer,
        forward=tuple(forward),
        backward=(*again, *backward),
        accumulate=tuple(extras[0]),
        into_bucket=tuple(extras[1]),
        out_of_bucket=tuple(extras[2]),
        launch_us=launch_us,
        on_cpu=book.gpu.kind == "cpu",
        saved_bytes=saved,
        matmul_s=0.0,
        weight_us=_weight_us(layer, capture, ops),
    )


def _recomputed(
    layer: Layer, capture: StepCapture, ops: Sequence[PricedOp], plan: ParallelPlan
) -> tuple[list[PricedOp], int]:
    """What backward does again first, and the bytes that are still saved.

    full: the whole layer from its input. selective: attention only (arXiv:2205.05198).
    """
    a, b = layer.forward
    if plan.recompute == "full":
        return list(ops[a:b]), layer.output_bytes
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


def _like(p: ParamSpec) -> TensorSpec:
    return TensorSpec(shape=p.shape, dtype=p.dtype)


def _priceable(op: str, args: tuple[Any, ...], p: ParamSpec, book: PriceBook) -> Priceable:
    call = OpCall(op=op, args=args, outputs=(_like(p),), phase="backward", module="DDP")
    return priceable(call, cold=cold_share(book.gpu)(2.0 * p.nbytes))


def _accumulate(p: ParamSpec, book: PriceBook) -> Priceable:
    return _priceable("aten.add_.Tensor", (_like(p), _like(p)), p, book)


def _into_bucket(p: ParamSpec, book: PriceBook) -> Priceable:
    scale = TensorSpec(shape=(), dtype=p.dtype)
    return _priceable("aten.mul.Tensor", (_like(p), scale), p, book)


def _out_of_bucket(p: ParamSpec, book: PriceBook) -> Priceable:
    return _priceable("aten.copy_.default", (_like(p), _like(p)), p, book)


EXTRAS = (_accumulate, _into_bucket, _out_of_bucket)


def instances(layers: Sequence[tuple[PricedLayer, int]]) -> Iterator[PricedLayer]:
    """Every layer as often as it is there."""
    for layer, count in layers:
        yield from (layer for _ in range(count))
