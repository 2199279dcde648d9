"""Simulates one process or plain DDP with a task for every op.

``predict --trace`` shows it, and tests check forecasts against it; these come from layers folded to
a few tasks (``itercast.compose.simulate.iteration``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from itercast.compose.graph.cuda_variants import with_cuda_variants
from itercast.compose.graph.launch_modes import as_launched
from itercast.compose.pricing.collectives import cluster, price_messages
from itercast.compose.pricing.gradient_buckets import Sync, ddp_step, default_contention
from itercast.compose.pricing.host import launch_costs, led_by_graph
from itercast.compose.pricing.price_book import PriceBook, PricedOp
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.compose.simulate.rank import LATENCY, SHARED
from itercast.compose.simulate.timeline import Span, Task, simulate_shared
from itercast.microbench.opcall import StepCapture
from itercast.microbench.plan import ParallelPlan


def op_timeline(
    capture: StepCapture, book: PriceBook, plan: ParallelPlan
) -> tuple[list[Task], list[Span]]:
    """Tasks and spans of the step of one data-parallel rank; all ranks do the same."""
    on_cpu = book.gpu.kind == "cpu"
    capture = as_launched(capture)
    capture = capture if on_cpu else with_cuda_variants(capture)
    costs = launch_costs(capture, capture.host, book)
    syncs: list[Sync] = []
    if plan.dp > 1:
        capture, syncs = ddp_step(capture)
    launched = replace(capture, engine="eager")  # it is rewritten for its engine already
    graph = rank_graph(launched, ParallelPlan(), book.gpu)
    wanted = graph.ops(range(len(capture.calls)))
    priced = dict(zip(wanted, book.price(list(wanted.values())), strict=True))
    ops = list(led_by_graph(graph.layers, priced, costs)[1].values())
    added = [c.module == "DDP" for c in capture.calls]
    waits_us = [costs.us(op, added=a) for op, a in zip(ops, added, strict=True)]
    ops = [replace(op, kernels=costs.kernels(op)) for op in ops]
    messages = price_messages([s.message for s in syncs], book, cluster(plan, book.gpu))
    sent = list(zip(syncs, messages, strict=True))
    tasks = lanes(ops, waits_us, on_cpu, sent)
    return tasks, simulate_shared(tasks, SHARED, default_contention(book.gpu))


def lanes(
    ops: Sequence[PricedOp],
    launches_us: Sequence[float],
    on_cpu: bool,
    syncs: Sequence[tuple[Sync, PricedOp]] = (),
) -> list[Task]:
    """The step as tasks on lanes.

    On a CPU an op's host time lengthens it. On a GPU the host lane issues one op after the
    other and a kernel starts when it is issued and the compute lane is free; an op of several
    kernels is as many tasks. Collectives run on the comm lane in the order of ``syncs``.
    """
    waiting = sorted(syncs, key=lambda s: s[0].after)
    awaited: dict[int, list[int]] = {}
    tasks: list[Task] = []
    for index, (op, launch_us) in enumerate(zip(ops, launches_us, strict=True)):
        after = tuple(awaited.pop(index, ()))
        for _ in range(op.kernels):
            if not on_cpu:
                after += (len(tasks),)
                tasks.append(Task(("host",), launch_us / op.kernels, name=f"launch {op.op}"))
            compute = len(tasks)
            duration_us = op.duration_us / op.kernels + (launch_us if on_cpu else 0.0)
            tasks.append(Task(("compute",), duration_us, after, op.op))
        while waiting and waiting[0][0].after <= index:
            sync, priced = waiting.pop(0)
            before = (compute,)
            if priced.latency_us:
                before = (len(tasks),)
                tasks.append(Task((LATENCY,), priced.latency_us, (compute,), priced.op))
            awaited.setdefault(sync.before, []).append(len(tasks))
            sent_us = priced.duration_us - priced.latency_us
            tasks.append(Task(("comm",), sent_us, before, priced.op))
    return tasks
