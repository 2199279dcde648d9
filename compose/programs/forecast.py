"""Forecasts one step of a captured program on GPUs that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from itercast.capture.base.durations import counted
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture
from itercast.compose.forecast import Forecast, report
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.pricing.collectives import default_contention, gpus_per_domain
from itercast.compose.pricing.host import PYTHON
from itercast.compose.pricing.price_book import PriceBook, price_book
from itercast.compose.programs.price import PricedRank, cluster_of, price_rank
from itercast.compose.programs.timeline import COMPUTE, LAUNCH, simulate_program
from itercast.compose.simulate.breakdown import (
    Outcome,
    Tally,
    broken_down,
    covered_us,
    time_on_lanes,
)
from itercast.compose.simulate.timeline import Span, Task
from itercast.compose.target import Target
from itercast.compose.trace.events import Trace, program_trace


def forecast_program(program: ProgramCapture, target: Target) -> Forecast:
    """The forecast of one step in a steady state: the second of two that follow each other."""
    ranks, book, cores_frac = _priced(program, target)
    tasks, spans, ends = simulate_program(ranks, default_contention(book.gpu), cores_frac)
    iteration_us = ends[1] - ends[0]
    slowest = max(ranks, key=lambda r: _busy_us(r, tasks, spans))
    outcome = _outcome(slowest, program, ranks[slowest], book, iteration_us, tasks, spans)
    world = program.world_size
    everyone, per_node = {"world": tuple(range(world))}, _per_node(program, target)
    return report(
        outcome,
        book,
        plan=f"program on {counted(world, 'rank')}",
        bundle_name=target.bundle_name,
        room=room_bytes(book.gpu, ParallelPlan(dp=world)),
        network=cluster_of(everyone, book.gpu, target.node, per_node).network,
        world_size=world,
        samples=world * program.samples,
        tokens=world * program.tokens,
    )


def trace_of_program(program: ProgramCapture, target: Target) -> Trace:
    """The trace of the ops and messages of two steps of all captured ranks."""
    ranks, book, cores_frac = _priced(program, target)
    contention = default_contention(book.gpu)
    tasks, spans, _ = simulate_program(ranks, contention, cores_frac, each_op=True)
    return program_trace(tasks, spans, program.peak_bytes)


def _per_node(program: ProgramCapture, target: Target) -> int:
    """Ranks that reach each other without the network."""
    if target.gpu.kind == "cpu":
        return program.world_size
    return gpus_per_domain(target.gpu, target.node)


def _priced(
    program: ProgramCapture, target: Target
) -> tuple[dict[int, PricedRank], PriceBook, float]:
    """The captured ranks with prices, and the share of a CPU's cores that one of them takes."""
    gpu, world = target.gpu, program.world_size
    threads = max(1, gpu.sm_count // world) if gpu.kind == "cpu" else 0
    book = price_book(target.bundle, gpu, threads, target.stack, target.host).on(
        target.machine, target.known, target.model
    )
    per_node = _per_node(program, target)
    ranks = {r: price_rank(s, book, target.node, per_node) for r, s in program.ranks.items()}
    return ranks, book, world * threads / gpu.sm_count / len(ranks)


def _busy_us(rank: int, tasks: Sequence[Task], spans: Sequence[Span]) -> float:
    return covered_us(_spans(rank, tasks, spans, (COMPUTE,)))


def _spans(
    rank: int, tasks: Sequence[Task], spans: Sequence[Span], names: Sequence[str] = ()
) -> list[Span]:
    """Spans of a rank's work of one of these kinds, of all but launches if none is named."""
    return [
        s
        for t, s in zip(tasks, spans, strict=True)
        if any(lane.split()[0] == str(rank) for lane in t.lanes)
        and (t.name in names if names else not t.name.startswith(LAUNCH))
    ]


def _outcome(
    rank: int,
    program: ProgramCapture,
    priced: PricedRank,
    book: PriceBook,
    iteration_us: float,
    tasks: Sequence[Task],
    spans: Sequence[Span],
) -> Outcome:
    """A rank's step, broken down; its two steps count half each."""
    computing = _spans(rank, tasks, spans, (COMPUTE,))
    sending = [s for s in _spans(rank, tasks, spans) if s not in computing]
    both = time_on_lanes(2 * iteration_us, computing, sending)
    return broken_down(
        both.plus(both, -1 / 2),
        _tally(priced, book),
        memory={"tensors": max(program.peak_bytes.values())},
        matmul_s=priced.matmul_s,
        tasks=tuple(tasks),
        spans=tuple(spans),
        host_gap_us=inf if len(program.ranks) == 1 else 0.0,  # else it may wait for other ranks
    )


def _tally(priced: PricedRank, book: PriceBook) -> Tally:
    """The times of a rank's launches by family, and its host's."""
    tally = Tally(book.gpu.kind == "cpu")
    pairs = [(c, op) for c, op in zip(priced.calls, priced.ops, strict=True) if op is not None]
    tally.add(op for _, op in pairs)
    others = [op for c, op in pairs if c.op != COLLECTIVE and not c.graphed and op.phase != PYTHON]
    tally.host.add_all(priced.launches.total(others))
    return tally
