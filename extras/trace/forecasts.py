"""The timelines that ``--trace`` writes: what a forecast simulates, op by op."""

from __future__ import annotations

from dataclasses import replace

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.program import ProgramCapture
from itercast.compose.forecast import rank_of
from itercast.compose.graph.identity_cache import Once
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.programs.forecast import peak_bytes, priced_program
from itercast.compose.programs.timeline import simulate_program
from itercast.compose.simulate.rank import Rank
from itercast.compose.target import Target
from itercast.extras.trace.events import Trace, program_trace
from itercast.extras.trace.plan import plan_trace
from itercast.microbench.hardware.node import Node


def trace_step(step: StepCapture, target: Target) -> Trace:
    """The timeline of a captured step's iteration: all ranks, stages and micro-batches."""
    rank = shown_rank(step, target.plan, target.book, target.node)
    return plan_trace(rank, step.optimizer)


def shown_rank(
    step: StepCapture, plan: ParallelPlan, book: PriceBook, node: Node | None = None
) -> Rank:
    """The rank that a forecast of the step simulates, with a task for every op."""
    rank = rank_of(step, plan, book, cluster_for(plan, book.gpu, node))
    layers = tuple(replace(x, shown=True) for x in rank.model.layers)
    model = replace(rank.model, layers=layers, once=Once())
    return replace(rank, model=model, layers=model.each_layer)


def trace_program(program: ProgramCapture, target: Target) -> Trace:
    """The timeline of the ops and messages of two steps of all captured ranks."""
    ranks, book, cores_frac = priced_program(program, target)
    runs, _ = simulate_program(ranks, book.contention, cores_frac, each_op=True)
    return program_trace(runs, peak_bytes(program, ranks))
