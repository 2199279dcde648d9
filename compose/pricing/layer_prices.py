"""Prices a rank graph layer by layer: what all plans with the same tp, cp and ep degrees share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import floor

from itercast.capture.base.extensions import with_added
from itercast.capture.opcall import Places, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.identity_cache import Once
from itercast.compose.graph.layers import Layer
from itercast.compose.parallel.placement import Cluster, Group
from itercast.compose.pricing.collectives import Message, prefetch_messages
from itercast.compose.pricing.gradient_copies import ADDED
from itercast.compose.pricing.host import (
    Launches,
    host_cost,
    host_work,
    launch_costs,
    led_by_graph,
)
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import AssumedTime, PricedOp
from itercast.compose.pricing.rank_graph import (
    LayerCopies,
    Ops,
    RankGraph,
    price_calls,
    rank_graph,
)
from itercast.compose.pricing.recompute import ATTENTION, Recomputed, recomputed
from itercast.compose.pricing.work import Work, fold

AskedStep = tuple[StepCapture, ParallelPlan, Cluster]
# What one rank does of a step whose embedding tables lie on other ranks or outside of the GPU: its
# step, what is left of the plan, and bytes that a rank holds beside the step's, by purpose.
TablesElsewhere = Callable[
    [StepCapture, ParallelPlan, PriceBook, Cluster],
    tuple[StepCapture, ParallelPlan, Mapping[str, int]],
]


def _tables_elsewhere() -> TablesElsewhere:
    """The package that knows of such tables, by its entry point."""
    added: dict[str, TablesElsewhere] = with_added("tables_elsewhere", {}, Callable)
    if not added:
        raise ValueError("no installed package spreads embedding tables: shard, tables")
    return next(iter(added.values()))


@dataclass(frozen=True, kw_only=True)
class PricedLayer:
    """A layer's ops with durations, and by parameter the copies that gradients may need.

    ``saved_bytes``: activations that forward keeps for backward, those that are recomputed left
    out; ``kept``: ops whose results a selective checkpoint saves. ``launches``: host time of each
    op. ``shown``: a timeline is to show each op.
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
    matmul_s: float  # matrix products at peak, forward and backward without recomputation
    weights: frozenset[int]  # ops of backward by place that no input's gradient needs
    kept: Places = ()
    shown: bool = False
    fetches: bool = True  # backward needs parameters, and what was offloaded
    sharded: bool = True  # parameters that ranks share out are not gathered yet

    @property
    def numbered(self) -> bool:
        """``Layer.numbered``: whether it is one of a list of modules."""
        return self.layer.numbered

    @cached_property
    def without_experts(self) -> PricedLayer:
        """The layer without the parameters that ep spreads, and without their copies."""
        numbers = [i for i, p in enumerate(self.layer.parameters) if not p.spread]
        copies = (self.accumulate, self.into_bucket, self.out_of_bucket)
        accumulate, into, out = (tuple(copy[i] for i in numbers) for copy in copies)
        return replace(
            self, layer=self.layer.dense, accumulate=accumulate, into_bucket=into, out_of_bucket=out
        )

    @cached_property
    def whole(self) -> PricedLayer:
        """The layer where its parameters are gathered."""
        return replace(self, sharded=False)

    @cached_property
    def to_inputs(self) -> PricedLayer:
        """The layer with that part of backward which earlier layers wait for."""
        return replace(self, backward=tuple(self._of_backward(weights=False)))

    @cached_property
    def to_weights(self) -> PricedLayer:
        """The second part of a split backward: gradients of weights, ready after their ops."""
        places = sorted(self.weights)
        parameters = tuple(
            replace(p, ready_after=max(0, bisect_right(places, p.ready_after) - 1))
            if p.ready_after >= 0
            else p
            for p in self.layer.parameters
        )
        layer = replace(self.layer, parameters=parameters)
        backward = tuple(self._of_backward(weights=True))
        return replace(self, layer=layer, backward=backward, fetches=False)

    @property
    def weight_us(self) -> float:
        """Time of the part of backward that computes gradients of weights alone."""
        return sum(op.duration_us for op in self._of_backward(weights=True))

    def _of_backward(self, *, weights: bool) -> list[PricedOp]:
        """Ops of backward that compute gradients of weights alone, or all others."""
        return [op for i, op in enumerate(self.backward) if (i in self.weights) == weights]

    def fold(self, ops: Sequence[PricedOp]) -> Work:
        """Sum up ops, given in launch order, to their time on the host and on the compute lane."""
        by_id = {id(op): op for op in ops}  # equal ones are one object
        steps = {key: self.launches.step(op, added=op.phase == ADDED) for key, op in by_id.items()}
        return fold([steps[id(op)] for op in ops], self.on_cpu, shown=self.shown)

    @cached_property
    def forward_work(self) -> Work:
        """Forward of one micro-batch."""
        return self.fold(self.forward)

    @cached_property
    def backward_work(self) -> Work:
        """Backward of the first micro-batch, without gradient synchronisation."""
        return self.fold(self.backward)

    @cached_property
    def later_work(self) -> Work:
        """Backward of any later micro-batch: gradients are added to earlier ones."""
        return self.backward_work.then(self.fold(self.trained_only(self.accumulate)))

    @cached_property
    def scattered(self) -> tuple[PricedOp, ...]:
        """What FSDP copies before it scatters gradients: all of the layer by one call."""
        return _at_once(self.trained_only(self.into_bucket))

    @cached_property
    def gathered(self) -> tuple[PricedOp, ...]:
        """What FSDP copies after it gathered parameters: all of the layer by one call."""
        return _at_once(self.replicated_only(self.out_of_bucket))

    @cached_property
    def gathered_trained(self) -> tuple[PricedOp, ...]:
        """The same of parameters that have a gradient."""
        return _at_once(self.trained_only(self.out_of_bucket))

    def trained_only(self, copies: Sequence[PricedOp]) -> tuple[PricedOp, ...]:
        """From copies, one per parameter of the layer, those of parameters with a gradient."""
        pairs = zip(copies, self.layer.parameters, strict=True)
        return tuple(op for op, p in pairs if p.ready_after >= 0)

    def replicated_only(self, copies: Sequence[PricedOp]) -> tuple[PricedOp, ...]:
        """From copies, one per parameter, those of parameters that other replicas have too."""
        pairs = zip(copies, self.layer.parameters, strict=True)
        return tuple(op for op, p in pairs if not p.local)


def _at_once(copies: Sequence[PricedOp]) -> tuple[PricedOp, ...]:
    """One op, launched once, that takes as long as all these copies; none for no copies.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py calls split_with_sizes_copy and
    _chunk_cat for all parameters of a group.
    """
    if not copies:
        return ()
    total = AssumedTime()
    for op in copies:
        total.add_us(op.duration_us, op.assumed)
    nbytes = sum(op.nbytes for op in copies)
    whole = replace(copies[0], duration_us=total.total_us, assumed=total.shares, nbytes=nbytes)
    return (whole,)


@dataclass(frozen=True, kw_only=True)
class PricedModel:
    """All layers of one rank with prices, and the host time of its step.

    ``host`` is that of one micro-batch and the optimizer; ``optimizer_host_us`` is the optimizer's
    Python. ``added_bytes``: memory of embedding tables on the fullest rank that is not among the
    parameters, by purpose.
    """

    layers: tuple[PricedLayer, ...]
    graph: RankGraph
    host: PricedOp
    optimizer_host_us: float
    added_bytes: Mapping[str, int] = field(default_factory=dict)
    once: Once = field(default_factory=Once, compare=False)  # results of plans that share it

    @property
    def each_layer(self) -> tuple[PricedLayer, ...]:
        """The layers in forward order, equal ones one by one."""
        return tuple(x for x in self.layers for _ in range(x.layer.count))

    def added_to(self, first: PricedLayer) -> Mapping[str, int]:
        """``added_bytes`` of a stage with this first layer: tables are on the model's first one."""
        return self.added_bytes if self.has_tables(first) else {}

    def has_tables(self, first: PricedLayer) -> bool:
        """Whether a stage with this first layer is the model's first one, which has its tables."""
        return first.layer.name == self.layers[0].layer.name

    @property
    def optimizer_tensors(self) -> int:
        """Parameters that the captured optimizer updates."""
        return sum(p.ready_after >= 0 for p in self.graph.capture.parameters)


def price_model(
    capture: StepCapture, plan: ParallelPlan, book: PriceBook, cluster: Cluster
) -> PricedModel:
    """The step of one micro-batch with prices; ``capture`` has a rank's share of tokens.

    Kept by its rank graph, and the parts of the plan and of its placement that change prices.
    """
    if plan.shard or plan.tables:
        step, rest, added_bytes = _tables_elsewhere()(capture, plan, book, cluster)
        return replace(price_model(step, rest, book, cluster), added_bytes=added_bytes)
    graph = rank_graph(capture, plan, book.gpu, book.stack, book.whole_cells)
    groups = tuple(cluster.groups[axis] for axis in ("tp", "cp", "ep"))
    pairs = plan.microbatches if plan.ep_overlap else 1
    key = ("priced model", pairs, plan.parts("prices"), groups, cluster.node, book)
    return graph.once(key, partial(_price_graph, graph, plan, book, cluster))


def prefetch_steps(asked: Iterable[AskedStep], book: PriceBook) -> None:
    """Price the ops and messages of many plans at once: one call of the pricer per family.

    Plans that a rule forbids, and those that spread tables, are left out.
    """
    graphs: dict[int, RankGraph] = {}
    messages: dict[tuple[Message, Group], Cluster] = {}
    done = set[tuple[object, ...]]()
    for capture, plan, cluster in asked:
        with suppress(ValueError):
            graph = rank_graph(capture, plan, book.gpu, book.stack, book.whole_cells)
            graphs[id(graph)] = graph
            key = (id(graph), *(cluster.groups[axis] for axis in ("tp", "cp", "ep")))
            if key not in done:
                done.add(key)
                sent = graph.asked.messages.values()
                messages |= {(m, cluster.groups[m.axis]): cluster for m in sent}
    book.prefetch([op for graph in graphs.values() for op in graph.to_price()])
    for cluster in list(messages.values())[:1]:  # all are of one GPU and node
        prefetch_messages(list(messages), book, cluster)


def _price_graph(
    graph: RankGraph, plan: ParallelPlan, book: PriceBook, cluster: Cluster
) -> PricedModel:
    """The layers of a rank graph with prices, and the host time of its micro-batch."""
    if plan.recompute == "selective" and not any(c.op in ATTENTION for c in graph.capture.calls):
        raise ValueError(f"plan {str(plan)!r}: selective recomputes attention, the model has none")
    ops = price_calls(graph, plan, book, cluster)
    events = graph.capture.host
    optimizer_events = {name: n for name, n in events.items() if name.endswith("_step")}
    others = {name: n for name, n in events.items() if name not in optimizer_events}
    costs = launch_costs(graph.capture, others, book)
    optimizer = host_cost(optimizer_events, book)
    return PricedModel(
        layers=tuple(_price_layers(graph, ops, plan, book, costs)),
        graph=graph,
        host=host_work(_host_time(graph, ops, costs, optimizer)),
        optimizer_host_us=optimizer.duration_us,
    )


def _price_layers(
    graph: RankGraph,
    ops: Ops,
    plan: ParallelPlan,
    book: PriceBook,
    costs: Launches,
) -> Iterator[PricedLayer]:
    """Yields layers in forward order; where a share of them recomputes, it is spread evenly.

    The layer whose op waits for a CUDA graph's launch is apart from its equals.
    """
    not_recomputed, done = replace(plan, recompute="", recomputed=1.0), 0
    share = 1.0 if plan.recompute == "budget" else plan.recomputed
    leader, led = led_by_graph(graph.layers, ops, costs)
    _, copies = graph.prices(book)

    @cache  # those of kinds that alternate are there many times
    def priced(layer: Layer, layer_plan: ParallelPlan) -> PricedLayer:
        return _price_layer(layer, graph, ops, copies[layer.name], layer_plan, book, costs)

    for layer in graph.layers:
        if layer is leader:
            single, layer_plan = replace(layer, count=1), plan if share == 1 else not_recomputed
            yield _price_layer(single, graph, led, copies[layer.name], layer_plan, book, costs)
            if layer.count == 1:
                continue
            layer, done = replace(layer, count=layer.count - 1), 1
        if share == 1 or not layer.numbered:
            yield priced(layer, plan)
            continue
        single = replace(layer, count=1)
        for n in range(done, done + layer.count):
            recomputes = floor((n + 1) * share) > floor(n * share)
            yield priced(single, plan if recomputes else not_recomputed)
        done += layer.count


def _host_time(graph: RankGraph, ops: Ops, costs: Launches, optimizer: PricedOp) -> AssumedTime:
    """Host time of a micro-batch's ops, over all layers, and of the optimizer.

    ``optimizer`` is the captured optimizer's Python, over the captured parameters.
    """
    calls = graph.capture.calls
    of_muon = {i for m in graph.matrices.values() for i in m.numbers}
    update = [op for i, op in ops.items() if calls[i].phase == "optimizer" and i not in of_muon]
    host = costs.total(update)
    if not costs.by_op:
        led = led_by_graph(graph.layers, ops, costs)[1]
        host.add_all(costs.total(list(led.values())))
    for layer in graph.layers:
        updates = [graph.matrices[p.storage].numbers for p in layer.trained if p.matrix]
        spans = (range(*layer.forward), range(*layer.backward), *updates)
        layer_ops = [ops[i] for span in spans for i in span]
        host.add_all(costs.total(layer_ops), layer.count)
    tensors = sum(x.count * len(x.parameters) for x in graph.layers)
    captured = max(1, len(graph.capture.parameters))
    host.add_us(optimizer.duration_us * tensors / captured, optimizer.assumed)
    return host


def _price_layer(
    layer: Layer,
    graph: RankGraph,
    ops: Ops,
    copies: LayerCopies,
    plan: ParallelPlan,
    book: PriceBook,
    costs: Launches,
) -> PricedLayer:
    """A layer with prices; ops that it recomputes come first in its backward."""
    spans = (layer.forward, layer.backward)
    forward, backward = ([ops[i] for i in range(*span)] for span in spans)
    again = Recomputed(saved_bytes=layer.saved_bytes)
    if plan.recompute and layer.numbered:
        again = recomputed(layer, graph, ops, plan, book)
        later = tuple(
            replace(p, ready_after=p.ready_after + len(again.ops)) if p.ready_after >= 0 else p
            for p in layer.parameters
        )
        layer = replace(layer, parameters=later)
    accumulate, into, out = copies
    find_weights = partial(_weight_gradients, layer, graph.capture)
    weights = graph.once(("weights", layer.backward), find_weights)
    return PricedLayer(
        layer=layer,
        forward=(*again.forward, *forward),
        backward=(*again.ops, *backward),
        accumulate=accumulate,
        into_bucket=into,
        out_of_bucket=out,
        launches=costs,
        on_cpu=book.gpu.kind == "cpu",
        saved_bytes=again.saved_bytes,
        kept=again.kept,
        matmul_s=sum(map(graph.matmul_s, spans)),
        weights=frozenset(len(again.ops) + i for i in weights),
    )


def _weight_gradients(layer: Layer, capture: StepCapture) -> list[int]:
    """Calls, counted from the start of a layer's backward, whose results no earlier layer needs.

    They compute gradients of weights alone, which only the optimizer waits for.
    """
    begin, end = layer.backward
    later = (c for c in capture.calls[end:] if c.phase == "backward")
    needed, numbers = {t.storage for c in later for t in c.tensors()}, list[int]()
    for i in range(end - 1, begin - 1, -1):
        call = capture.calls[i]
        if needed.isdisjoint(t.storage for t in call.outputs):
            numbers.append(i - begin)
        else:
            needed |= {t.storage for t in call.tensors()}
    return numbers
