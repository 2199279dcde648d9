"""Prices the launches of a captured rank: ops, and collectives by the nodes of their ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.programs.program import (
    COLLECTIVE,
    HOST,
    HOST_COPY,
    MARKS,
    ON_CPU,
    ProgramCapture,
    launch_order,
)
from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.compiled.repeats import without_repeats
from itercast.compose.graph.cuda_variants import with_cuda_variants, with_whole_networks
from itercast.compose.graph.lifetimes import lifetimes, most_bytes
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.parallel.placement import Cluster, Group
from itercast.compose.pricing.host import Launches, launch_costs, on_host, python_op
from itercast.compose.pricing.optimizer import update_bytes, with_loops
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import PricedOp, priceable
from itercast.compose.pricing.rank_graph import (
    AskedCalls,
    axis_among,
    check_units,
    partly_hidden,
    ranks_of,
)
from itercast.compose.simulate.fsdp import FORWARD_SHARE
from itercast.compose.simulate.rank import host_copy
from itercast.compose.simulate.stage_rank import SCHEDULE_SHARE
from itercast.microbench.hardware.node import Node
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import stack_of_row

DISPATCH_SHARE: float = assumed(__file__, "dispatch_share")
UNPRICED = (HOST, *MARKS)  # Python of wrappers, and what takes no time
BETWEEN = ("aten.cat.default", "aten.clone.default")  # a message and a product: another layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRank:
    """A rank's launches in order; ``ops`` has None for marks, which take no time.

    ``matmul_s``: seconds of its matrix products at peak, without those that are recomputed.
    ``more_bytes``: peak memory of compiled kernels minus that of the single ops which a capture
    runs instead; mostly < 0.
    """

    calls: tuple[OpCall, ...]
    ops: tuple[PricedOp | None, ...]
    launches: Launches
    on_cpu: bool
    matmul_s: float
    more_bytes: int


def price_rank(
    step: StepCapture, book: PriceBook, node: Node | None, per_node: int, world: int
) -> PricedRank:
    """Price the launches of one of ``world`` ranks.

    ``per_node`` GPUs reach each other without the network. ValueError where the GPU has no units
    for a dtype.
    """
    on_cpu = book.gpu.kind == "cpu"
    if not on_cpu:
        check_units(step, book.gpu)
    eager = with_whole_networks(step, book.whole_cells)
    step = without_repeats(eager, apart=uncompiled)
    beside_products = products_beside(step.calls)
    step = inductor_kernels(step, apart=uncompiled)
    step = step if on_cpu else with_cuda_variants(step, book.gpu)
    step = with_loops(step) if stack_of_row(book.stack).one_by_one and not on_cpu else step
    more_bytes = most_bytes(lifetimes(step)) - most_bytes(lifetimes(eager))
    step = step if on_cpu else _with_launches(step)
    calls, cold = step.calls, cold_fractions(step, book.gpu, per_node if on_cpu else 1)
    of_host = [i for i, c in enumerate(calls) if c.stream == ON_CPU or c.op in UNPRICED]
    asked = AskedCalls.of(calls, cold, sorted({*range(len(calls))} - {*of_host}))
    groups = [ranks_of(call) for call in calls if call.op == COLLECTIVE]
    ranks = {axis_among(group): group for group in groups}
    cluster = cluster_of(ranks, book.gpu, node, per_node)
    priced = asked.sent(book, cluster)
    sharing_host = replace(cluster, gpus_per_node=min(world, per_node))
    priced |= _of_host({i: calls[i] for i in of_host}, sharing_host)
    priced |= dict(zip(asked.ops, book.price(list(asked.ops.values())), strict=True))
    priced |= {i: _python(c, book) for i, c in enumerate(calls) if c.op == HOST}
    priced |= sent_in_parts(calls, priced, beside_products, book)
    order = launch_order(calls)
    computed = [i for i in order if i in asked.ops]
    launched = StepCapture(calls=tuple(calls[i] for i in computed if not calls[i].graphed))
    return PricedRank(
        calls=tuple(calls[i] for i in order),
        ops=tuple(priced.get(i) for i in order),
        launches=launch_costs(launched, step.host, book),
        on_cpu=on_cpu,
        matmul_s=sum(asked.ops[i].matmul_s(book.gpu) for i in computed if not calls[i].recomputed),
        more_bytes=more_bytes,
    )


def uncompiled(call: OpCall) -> bool:
    """Whether a program launches a call itself, and no compiled function does."""
    return not call.compiled


def _of_host(calls: Mapping[int, OpCall], cluster: Cluster) -> dict[int, PricedOp]:
    """Copies between host and GPU, and the CPU's work on what lies in host memory."""
    priced = dict[int, PricedOp]()
    for i, call in calls.items():
        if call.op == HOST_COPY:
            direction, nbytes = call.args
            priced[i] = host_copy(direction, nbytes, cluster.gpu)
        elif call.stream == ON_CPU:
            priced[i] = on_host(call.op, update_bytes([priceable(call)]), cluster)
    return priced


def product_dtypes(program: ProgramCapture, gpu: Gpu) -> list[str]:
    """Dtypes of a program's matrix products on a GPU, first that in which they take longest."""
    step = program.ranks[min(program.ranks)]
    calls = (step if gpu.kind == "cpu" else with_whole_networks(step)).calls
    seconds_by_dtype = defaultdict[str, float](float)
    computed = [i for i in launch_order(calls) if calls[i].op not in (COLLECTIVE, *UNPRICED)]
    for i in computed:
        op = priceable(calls[i]).run_by(gpu)
        if seconds := op.matmul_s(gpu):
            seconds_by_dtype[op.params.dtype] += seconds
    return sorted(seconds_by_dtype, key=seconds_by_dtype.__getitem__, reverse=True)


def _with_launches(step: StepCapture) -> StepCapture:
    """The step with the first op of each CUDA graph launched by the host (``graphed`` = 0).

    The graph's other ops keep its number in ``graphed``, as that one launch starts them too.
    """
    calls, last = [], 0
    for call in step.calls:
        computed = call.op not in (COLLECTIVE, HOST, *MARKS)
        calls.append(replace(call, graphed=0) if computed and call.graphed != last else call)
        last = call.graphed if computed else last
    return replace(step, calls=tuple(calls))


def _python(call: OpCall, book: PriceBook) -> PricedOp:
    """The host's Python of a parallel wrapper at this call: a share of its event's time.

    Forward and backward split the time of FSDP's and of a pipeline's events.
    """
    event, tensors = call.args
    if event == "dtensor_op":
        return python_op("tp_product", 1, book, DISPATCH_SHARE)
    backward = call.phase == "backward"
    share = 1.0
    if event.startswith("fsdp_layer"):
        share = 1 - FORWARD_SHARE if backward else FORWARD_SHARE
    elif event == "pipeline_micro":
        share = 1 - SCHEDULE_SHARE if backward else SCHEDULE_SHARE
    return python_op(event, tensors, book, share)


def cluster_of(
    ranks: Mapping[str, tuple[int, ...]], gpu: Gpu, node: Node | None, per_node: int
) -> Cluster:
    """Named groups of ranks on nodes that are filled one after the other.

    ``Group.per_node``: the most ranks of a group that share a node.
    """
    groups = {
        name: Group(size=len(group), per_node=max(Counter(r // per_node for r in group).values()))
        for name, group in ranks.items()
    }
    return Cluster(gpu=gpu, node=node, gpus_per_node=per_node, groups=groups)


def products_beside(calls: Sequence[OpCall]) -> dict[int, list[int]]:
    """For each storage that a partly sent message writes, storages written by products beside it.

    That is async tensor parallelism: the products read what an all_gather brings, or write what a
    reduce_scatter sends.
    """
    readers, writers = defaultdict[int, list[int]](list), dict[int, int]()
    for i, call in enumerate(calls):
        for storage in _read(call):
            readers[storage].append(i)
    products = dict[int, list[int]]()
    for i, call in enumerate(calls):
        if call.kwargs.get("in_parts"):
            if call.kwargs["kind"] == "all_gather":
                beside = _products_of_gathered(i, calls, readers)
            else:
                beside = _product_of_scattered(i, calls, writers)
            products[call.outputs[0].storage] = [calls[j].outputs[0].storage for j in beside]
        writers |= dict.fromkeys({t.storage for t in call.outputs} - _read(call), i)  # no views
    return products


def _read(call: OpCall) -> set[int]:
    """The storages that a call reads."""
    return {t.storage for t in call.tensors()}


def _products_of_gathered(
    i: int, calls: Sequence[OpCall], readers: Mapping[int, list[int]]
) -> Iterator[int]:
    """Numbers of the products whose rows message ``i`` gathers."""
    storages = [t.storage for t in calls[i].outputs]
    while storages:
        storage = storages.pop()
        for j in readers[storage]:
            call = calls[j]
            if j < i or call.phase != calls[i].phase:
                continue
            if call.op in LINEAR_PRODUCTS:
                rows = call.args[-2]
                if rows.storage == storage and rows.stride[-1] == 1:
                    yield j
            elif call.op in BETWEEN:
                storages += [t.storage for t in call.outputs]


def _product_of_scattered(
    i: int, calls: Sequence[OpCall], writers: Mapping[int, int]
) -> Iterator[int]:
    """The product whose result message ``i`` scatters, if there is one."""
    writer = writers.get(calls[i].tensors()[0].storage)
    while writer is not None and calls[writer].op in BETWEEN:
        writer = writers.get(calls[writer].tensors()[0].storage)
    if writer is not None and calls[writer].op in LINEAR_PRODUCTS:
        yield writer


def sent_in_parts(
    calls: Sequence[OpCall],
    ops: Mapping[int, PricedOp],
    beside: Mapping[int, Sequence[int]],
    book: PriceBook,
) -> dict[int, PricedOp]:
    """By call, messages that are sent in parts; each takes the time that the products beside leave.

    ``beside``: of ``products_beside``. Of n ranks' parts one is there from the start, or is
    computed before any is sent, so that (n - 1) / n of the products hide messages.
    """
    makers = {c.outputs[0].storage: i for i, c in enumerate(calls) if c.op in LINEAR_PRODUCTS}
    priced = dict[int, PricedOp]()
    for i, call in enumerate(calls):
        if call.kwargs.get("in_parts"):
            ranks = len(call.kwargs["ranks"])
            products = [ops[makers[s]] for s in beside[call.outputs[0].storage] if s in makers]
            priced[i] = partly_hidden(ops[i], (ranks - 1) / ranks, products, book)
    return priced


def sent_bytes(program: ProgramCapture) -> dict[str, int]:
    """Bytes of the messages that the first captured rank takes part in during a step, by kind.

    Kinds are collectives: all_reduce, all_gather...
    """
    sent = Counter[str]()
    for call in messages(program):
        sent[call.kwargs["kind"]] += call.kwargs["bytes"]
    return dict(sent.most_common())


def messages(program: ProgramCapture) -> list[OpCall]:
    """The collectives of the first captured rank in a step that other ranks take part in.

    Those of repeated layers are written out; they come in the order in which they are launched.
    """
    calls = without_repeats(program.ranks[min(program.ranks)], apart=uncompiled).calls
    launched = (calls[i] for i in launch_order(calls))
    return [c for c in launched if c.op == COLLECTIVE and len(c.kwargs["ranks"]) > 1]
