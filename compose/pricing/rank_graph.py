"""The rank graph: the op calls of one rank of a plan, their layers, and the times of the calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, takewhile

from itercast.capture.opcall import CELLS, NARROW, OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import added_keys
from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.codecs import compressed
from itercast.compose.graph.cuda_variants import (
    with_byte_masks,
    with_cuda_variants,
    with_whole_networks,
)
from itercast.compose.graph.identity_cache import Once, once_of
from itercast.compose.graph.launch_modes import FUSED, FUSED_GRAPH, UNFUSED, as_launched
from itercast.compose.graph.layers import Layer, split_layers
from itercast.compose.graph.lifetimes import input_bytes, read_instead, update_bytes
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.cp import context_parallel
from itercast.compose.parallel.ep import expert_parallel, with_buffers
from itercast.compose.parallel.mixed_precision import IN_HALF, casts
from itercast.compose.parallel.placement import Cluster
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.collectives import Message, price_messages
from itercast.compose.pricing.gradient_copies import buffers, gradient_copies
from itercast.compose.pricing.optimizer import MatrixUpdate, matrix_updates
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, PricedOp, priceable
from itercast.compose.pricing.work import side_by_side_us
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import USUAL

# Collectives that no family measures, as those that move the same bytes the same way.
SAME_AS: Mapping[str, str] = {
    "send": "send_recv",
    "recv": "send_recv",
    "reduce": "broadcast",
    "gather": "all_gather",
    "scatter": "broadcast",
    "barrier": "all_reduce",
}
Ops = Mapping[int, PricedOp]  # by number of the call
Overlapped = tuple[float, Sequence[PricedOp]]  # a message overlaps this share of these ops' time
LayerCopies = tuple[tuple[PricedOp, ...], ...]  # by kind (``gradient_copies``), by parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCalls:
    """Calls of one rank to price, by their number; they may be of a plan or of a program."""

    ops: Mapping[int, Priceable]
    messages: Mapping[int, Message]

    @classmethod
    def of(
        cls, calls: Sequence[OpCall], cold: Sequence[float], numbers: Iterable[int]
    ) -> AskedCalls:
        """The calls of these numbers; ``cold``: the share of each call's bytes not in a cache."""
        chosen = {i: calls[i] for i in numbers}
        sent = {i: call for i, call in chosen.items() if call.op == COLLECTIVE}
        return cls(
            ops={i: priceable(call, cold[i]) for i, call in chosen.items() if i not in sent},
            messages={i: message_of(call) for i, call in sent.items()},
        )

    def sent(self, book: PriceBook, cluster: Cluster) -> dict[int, PricedOp]:
        """Times of the messages by number of the call, each as if no other were sent."""
        return dict(
            zip(
                self.messages,
                price_messages(list(self.messages.values()), book, cluster),
                strict=True,
            )
        )


def message_of(call: OpCall) -> Message:
    """The message of a collective call: in a plan along an axis, in a program among its ranks."""
    t, facts = call.args[0], call.kwargs
    stated = "bytes" in facts  # by a program
    return Message(
        kind=SAME_AS.get(facts["kind"], facts["kind"]),
        axis=axis_among(ranks_of(call)) if stated else facts["axis"],
        message_bytes=max(1, facts["bytes"]) if stated else round(t.nbytes * facts["scale"]),
        dtype=t.dtype,
        routed=facts.get("routed", (0, 0)),
    )


def ranks_of(call: OpCall) -> tuple[int, ...]:
    """The ranks of a program's collective, or the two of its message."""
    facts = call.kwargs
    return (facts["rank"], facts["peer"]) if facts["peer"] >= 0 else tuple(facts["ranks"])


def axis_among(ranks: tuple[int, ...]) -> str:
    """The name of the axis along which these ranks of a program lie."""
    return ",".join(map(str, ranks))


@dataclass(frozen=True, kw_only=True)
class RankGraph:
    """A rank's op calls of one micro-batch and their layers.

    ``cold``: the share of each call's bytes that no cache holds. ``copies``: by layer name and
    parameter, the ops that synchronising its gradient adds (``gradient_copies``). ``buffers``:
    running statistics by dtype. ``input_bytes``: what forward reads beside parameters.
    ``optimizer``: the optimizer's calls, without Muon's (``matrices``, by storage) and without
    those over shards of embedding tables (``tables``). Temporary bytes of the update:
    ``update_share`` times the bytes of gradients, ``matrix_bytes`` for one matrix, ``table_bytes``
    for tables. ``tied``: weights of the first layer that the last one uses too. ``unfused``: the
    calls before fusion into kernels.
    """

    capture: StepCapture
    gpu: Gpu
    layers: tuple[Layer, ...]
    cold: Sequence[float]
    copies: Mapping[str, Sequence[Sequence[Priceable]]]
    optimizer: tuple[Priceable, ...]
    tables: tuple[Priceable, ...]
    matrices: Mapping[int, MatrixUpdate]
    buffers: dict[str, list[TensorSpec]]
    input_bytes: int
    update_share: float
    matrix_bytes: int
    table_bytes: int
    tied: tuple[ParamSpec, ...]
    unfused: StepCapture
    once: Once = field(default_factory=Once, compare=False)  # results of plans that share it

    @cached_property
    def priced(self) -> tuple[int, ...]:
        """Numbers of the calls that are priced.

        They are the calls of one of several equal layers, the optimizer's, and what runs beside
        messages.
        """
        calls = self.capture.calls
        spans = [range(*span) for x in self.layers for span in (x.forward, x.backward)]
        numbers = {i for span in spans for i in span}
        numbers |= {i for i, c in enumerate(calls) if c.phase == "optimizer"}
        messages = [i for i in numbers if calls[i].op == COLLECTIVE]
        while messages:
            more = set(_beside(messages.pop(), calls)) - numbers
            numbers |= more
            messages += [i for i in more if calls[i].op == COLLECTIVE]
        return tuple(sorted(numbers))

    @cached_property
    def _apart(self) -> tuple[StepCapture, dict[str, Layer]]:
        """The calls before fusion as a GPU runs them, and the layers that they make, by name."""
        if self.unfused.engine in UNFUSED:
            return self.capture, {x.name: x for x in self.layers}
        calls = (
            self.unfused if self.gpu.kind == "cpu" else with_cuda_variants(self.unfused, self.gpu)
        )
        return calls, {x.name: x for x in split_layers(calls)}

    def before_fusion(self, layer: Layer) -> tuple[StepCapture, Layer]:
        """The calls before fusion into kernels, and this layer (or one equal to it) among them.

        Kernels may span layers: only single calls tell what crosses a boundary and what is saved.
        """
        calls, layers = self._apart
        names = [x.name for x in self.layers]
        earlier = (n for n in reversed(names[: names.index(layer.name) + 1]) if n in layers)
        return calls, layers[next(earlier)]

    @cached_property
    def asked(self) -> AskedCalls:
        """The calls whose times are asked for, as ops and messages."""
        return AskedCalls.of(self.capture.calls, self.cold, self.priced)

    def prices(self, book: PriceBook) -> tuple[dict[int, PricedOp], dict[str, LayerCopies]]:
        """Times of the ops by number of the call, and of each layer's copies by its name."""
        return self.once(("prices", book), partial(self._prices, book))

    def to_price(self) -> list[Priceable]:
        """The ops, and then the copies of each layer by kind and parameter."""
        copies = (op for kinds in self.copies.values() for kind in kinds for op in kind)
        return [*self.asked.ops.values(), *copies]

    def _prices(self, book: PriceBook) -> tuple[dict[int, PricedOp], dict[str, LayerCopies]]:
        """Reads prices of ``to_price``: of ops by number, of copies by layer and parameter."""
        prices = iter(book.price(self.to_price()))
        ops = {i: next(prices) for i in self.asked.ops}
        copies = {
            layer: tuple(tuple(islice(prices, len(kind))) for kind in kinds)
            for layer, kinds in self.copies.items()
        }
        return ops, copies

    def matmul_s(self, span: tuple[int, int]) -> float:
        """Seconds of the matrix products of a range of calls at the GPU's peak."""
        ops = self.asked.ops
        return sum(ops[i].matmul_s(self.gpu) for i in range(*span) if i in ops)


def rank_graph(
    capture: StepCapture,
    plan: ParallelPlan,
    gpu: Gpu,
    stack: str = USUAL,
    cells: Collection[str] = CELLS,
) -> RankGraph:
    """Rewrite a captured micro-batch for a rank of the plan: expert, context, tensor parallel.

    ``cells``: recurrent networks that this device runs in one call, as its rows were measured.
    """
    if plan.amp and gpu.kind == "cpu":
        raise ValueError(f"plan {str(plan)!r}: amp is a GPU's autocast; a CPU casts other ops")
    if "parameters" in plan.offload and gpu.kind == "cpu":
        raise ValueError(f"plan {str(plan)!r}: a CPU has all parameters in host memory")
    ranks = plan.cpu_ranks if gpu.kind == "cpu" else 1
    cast = casts(capture, plan, stack)
    whole = once_of(capture)(("networks", *cells), partial(with_whole_networks, capture, cells))
    gathered = plan.zero > 1 and "compile" in capture.engine  # weights, by FSDP
    key = ("rank graph", plan.expert_tp, cast, gathered, *plan.parts("ops"), gpu, ranks)
    return once_of(whole)(key, partial(_rank_graph, whole, plan, gpu, ranks, cast, gathered))


def _rank_graph(
    capture: StepCapture, plan: ParallelPlan, gpu: Gpu, ranks: int, cast: str, gathered: bool
) -> RankGraph:
    """Rewrite the calls as a rank of the plan computes them, then as the device runs them.

    ``cast``: what runs in half precision (see ``casts``). ``ranks``: processes on this CPU.
    ``gathered``: see ``as_launched``.
    ValueError where the GPU has no units for a dtype.
    """
    if cast:
        capture = once_of(capture)(("in half", cast), partial(IN_HALF[cast], capture))
    trained = sum(p.nbytes for p in capture.parameters if p.ready_after >= 0 and not p.matrix)
    for name, value in plan.more:
        capture = added_keys()[name].step(capture, plan, value)
    capture = context_parallel(expert_parallel(capture, plan), plan)
    capture = tensor_parallel(capture, plan, summed=gpu.kind != "cpu")
    capture = with_buffers(capture) if plan.ep > 1 else capture
    unfused = capture if gpu.kind == "cpu" else with_byte_masks(capture)
    capture = compressed(as_launched(unfused, gathered=gathered), plan)
    check_units(capture, gpu)
    capture = capture if gpu.kind == "cpu" else with_cuda_variants(capture, gpu)
    fused = capture.engine in (FUSED, FUSED_GRAPH)  # kernels of a framework's own
    layers = tuple(split_layers(capture, read_instead(unfused) if fused else {}))
    step_bytes = sum(c.touched_bytes for c in capture.calls if c.op != COLLECTIVE)
    cold, named = cold_fractions(capture, gpu, ranks), {x.name: x for x in layers}
    matrices = matrix_updates(capture, cold)
    of_muon = {i for m in matrices.values() for i in m.numbers}
    update = {i for i, c in enumerate(capture.calls) if c.phase == "optimizer"} - of_muon
    of_tables = {i for i in update if capture.calls[i].module}  # a part of the spread tables' step
    update -= of_tables
    return RankGraph(
        capture=capture,
        gpu=gpu,
        layers=layers,
        cold=cold,
        copies={n: gradient_copies(x, step_bytes, gpu, ranks) for n, x in named.items()},
        optimizer=tuple(priceable(capture.calls[i], cold[i]) for i in sorted(update)),
        tables=tuple(priceable(capture.calls[i], cold[i]) for i in sorted(of_tables)),
        matrices=matrices,
        buffers=buffers(capture.calls),
        input_bytes=input_bytes(unfused),
        update_share=update_bytes(capture, update) / max(1, trained),  # calls of all ranks
        matrix_bytes=update_bytes(capture, of_muon),
        table_bytes=update_bytes(capture, of_tables),
        tied=_tied(capture, layers),
        unfused=unfused,
    )


def price_calls(graph: RankGraph, plan: ParallelPlan, book: PriceBook, cluster: Cluster) -> Ops:
    """Calls and collectives with durations; overlapped collectives have their exposed time only."""
    ops = graph.asked.sent(book, cluster) | graph.prices(book)[0]
    calls = graph.capture.calls
    by_experts = _beside_experts(graph, ops, plan) if plan.ep_overlap else {}
    for i, sent in ((i, ops[i]) for i in graph.asked.messages):
        share, beside = by_experts[i] if i in by_experts else _overlapped(i, calls, ops, plan)
        ops[i] = partly_hidden(sent, share, beside, book)
    return ops


def partly_hidden(
    sent: PricedOp, share: float, beside: Sequence[PricedOp], book: PriceBook
) -> PricedOp:
    """A message that runs beside a ``share`` of these ops: only its exposed time is left."""
    beside_us = share * sum(op.duration_us for op in beside)
    if not beside_us:
        return sent
    product_us = share * sum(op.duration_us for op in beside if op.product)
    contention = book.contention_of(sent, product_us / beside_us)
    exposed_us = side_by_side_us(beside_us, sent.duration_us, contention) - beside_us
    hidden_us = max(0.0, sent.duration_us - exposed_us)
    return replace(sent, duration_us=exposed_us, hidden_us=hidden_us)


def _beside_experts(graph: RankGraph, ops: Ops, plan: ParallelPlan) -> dict[int, Overlapped]:
    """By message of ep: (share, ops) of another micro-batch's compute that hides it.

    A layer's compute, forward and backward, is divided among its messages; nothing hides those of
    the first micro-batch.
    """
    overlapped, messages = dict[int, Overlapped](), graph.asked.messages
    later_frac = 1 - 1 / plan.microbatches
    for layer in graph.layers:
        numbers = [*range(*layer.forward), *range(*layer.backward)]
        sent = [i for i in numbers if i in messages and messages[i].axis == "ep"]
        computed = [ops[i] for i in numbers if i not in messages]
        overlapped |= {i: (later_frac / len(sent), computed) for i in sent}
    return overlapped


def _overlapped(i: int, calls: Sequence[OpCall], ops: Ops, plan: ParallelPlan) -> Overlapped:
    """(share, ops): the compute of the same micro-batch that runs beside collective ``i``.

    With C chunks (CoCoNeT, tp_overlap), a product of time T and its collective first take T/C; then
    (C-1)/C of T and the collective run side by side.
    """
    call = calls[i]
    if call.kwargs["until_read"]:
        return 1.0, [ops[n] for n in until_read(i, calls)]
    if call.kwargs["overlaps_next"] and i + 1 in ops:
        return 1.0, [ops[i + 1]]
    if plan.chunks > 1 and call.kwargs["axis"] == "tp" and i:
        return (plan.chunks - 1) / plan.chunks, [ops[i - 1]]
    if plan.tp_overlap and call.kwargs["axis"] == "tp":
        return (plan.tp - 1) / plan.tp, _products(i, calls, ops)
    return 0.0, []


def _products(i: int, calls: Sequence[OpCall], ops: Ops) -> list[PricedOp]:
    """The products that read what collective ``i`` gathers, or that make what it scatters."""
    if calls[i].kwargs["kind"] != "all_gather":
        return [ops[i - 1]] if calls[i - 1].op in LINEAR_PRODUCTS else []
    return [ops[n] for n in _products_after(i, calls)]


def _products_after(i: int, calls: Sequence[OpCall]) -> Iterator[int]:
    """Numbers of the products that follow call ``i`` at once, one after the other."""
    return takewhile(lambda n: calls[n].op in LINEAR_PRODUCTS, range(i + 1, len(calls)))


def _beside(i: int, calls: Sequence[OpCall]) -> list[int]:
    """Numbers of the calls whose times ``_overlapped`` may ask for collective ``i``.

    The product before, of which parts are sent while others run; the call after, which overlaps;
    the products that read what is gathered; or all calls until one reads the result.
    """
    later = until_read(i, calls) if calls[i].kwargs["until_read"] else ()
    return [n for n in (i - 1, i + 1, *_products_after(i, calls), *later) if 0 <= n < len(calls)]


def until_read(i: int, calls: Sequence[OpCall]) -> Iterator[int]:
    """The calls of a phase from collective ``i`` up to the first that reads its result."""
    received = {t.storage for t in calls[i].outputs}
    for n in range(i + 1, len(calls)):
        other_phase = calls[n].phase != calls[i].phase
        if other_phase or received & {t.storage for t in calls[n].tensors()}:
            return
        yield n


def _tied(capture: StepCapture, layers: Sequence[Layer]) -> tuple[ParamSpec, ...]:
    """Weights of the first layer that the last one uses too."""
    if len(layers) < 2:
        return ()
    last_forward = capture.calls[slice(*layers[-1].forward)]
    used = {t.storage for call in last_forward for t in call.tensors()}
    return tuple(p for p in layers[0].parameters if p.storage in used)


def check_units(capture: StepCapture, gpu: Gpu) -> None:
    """ValueError where a product in 8 or 4 bits needs units that a GPU lacks; torch raises, too.

    Packed pairs of 4 bits are logged as bytes.
    """
    products = (c for c in capture.calls if "mm" in c.op.split(".")[1])
    read = {t.dtype for c in products for t in c.tensors()[:2]}
    narrow = {"nvfp4" if dtype == "uint8" else dtype for dtype in read} & {*NARROW}
    for dtype in sorted(narrow - set(gpu.peak_flops_per_s)):
        units = sorted(gpu.peak_flops_per_s)
        raise ValueError(f"gpu {gpu.name!r}: no units for dtype {dtype!r}; it has {units}")
