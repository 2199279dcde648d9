"""Forecasts one step of a captured program on GPUs that need not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from statistics import fmean

from itercast.capture.base.durations import counted
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture
from itercast.compose.forecast import Forecast, as_trained, report
from itercast.compose.parallel.device_memory import room_bytes
from itercast.compose.parallel.placement import gpus_per_domain
from itercast.compose.pricing.host import PYTHON
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.programs.price import PricedRank, cluster_of, price_rank
from itercast.compose.programs.samples import batch_of
from itercast.compose.programs.timeline import simulate_program
from itercast.compose.simulate.breakdown import (
    Shares,
    Tally,
    broken_down,
    covered_us,
    lane_spans,
    shares,
)
from itercast.compose.target import Target


def forecast_program(program: ProgramCapture, target: Target) -> Forecast:
    """The forecast of one step in a steady state: of two that follow each other, the second."""
    ranks, book, cores_frac = priced_program(program, target)
    runs, iteration_us = simulate_program(ranks, book.contention, cores_frac)
    slowest = max(ranks, key=lambda r: covered_us(lane_spans(runs[r])["compute"]))
    two_steps, tally = shares(runs[slowest]), _tally(ranks[slowest], book)
    comm_us = two_steps.comm_us / 2 + tally.hidden_us
    outcome = broken_down(
        Shares(iteration_us, two_steps.compute_us / 2, two_steps.exposed_us / 2, comm_us),
        tally,
        runs[slowest],
        memory={"tensors": max(peak_bytes(program, ranks).values())},
        matmul_s=fmean(rank.matmul_s for rank in ranks.values()),
        host_gap_us=inf if len(program.ranks) == 1 else 0.0,  # else it may wait for other ranks
    )
    world = program.world_size
    batch = batch_of(program)
    all_ranks, per_node = {"world": tuple(range(world))}, _per_node(program, target)
    forecast = report(
        outcome,
        book,
        plan=f"program on {counted(world, 'rank')}",
        bundle_name=target.bundle_name,
        room=room_bytes(book.gpu, ParallelPlan(dp=world)),
        network=cluster_of(all_ranks, book.gpu, target.node, per_node).network,
        world_size=world,
        samples=batch.samples,
        tokens=batch.tokens,
    )
    held_us = iteration_us - runs[slowest].queued_us  # the GPU computes the rest by itself
    notes = (batch.note,) if batch.note else ()
    forecast = replace(forecast, host_held_us=held_us, notes=notes)
    trains = any(step.host.get("backward") for step in program.ranks.values())
    calls = (call for step in program.ranks.values() for call in step.calls)
    return as_trained(forecast, book, calls) if trains else forecast


def peak_bytes(program: ProgramCapture, ranks: Mapping[int, PricedRank]) -> dict[int, int]:
    """The peak memory of each captured rank, compiled where the program compiles."""
    return {rank: b + ranks[rank].more_bytes for rank, b in program.peak_bytes.items()}


def _per_node(program: ProgramCapture, target: Target) -> int:
    """Ranks that reach each other without the network."""
    if target.gpu.kind == "cpu":
        return program.world_size
    return gpus_per_domain(target.gpu, target.node)


def priced_program(
    program: ProgramCapture, target: Target
) -> tuple[dict[int, PricedRank], PriceBook, float]:
    """The captured ranks with prices, the price book, and the share of cores of each rank.

    The share is of a CPU's cores, and includes the ranks that the captured rank stands for.
    """
    gpu, world = target.gpu, program.world_size
    threads = max(1, gpu.sm_count // world) if gpu.kind == "cpu" else 0
    book = replace(target, threads=threads).book
    per_node = _per_node(program, target)
    ranks = {r: price_rank(s, book, target.node, per_node, world) for r, s in program.ranks.items()}
    return ranks, book, world * threads / gpu.sm_count / len(ranks)


def _tally(priced: PricedRank, book: PriceBook) -> Tally:
    """The times of a rank's launches by family, and its host's."""
    tally = Tally(book.gpu.kind == "cpu")
    pairs = [(c, op) for c, op in zip(priced.calls, priced.ops, strict=True) if op is not None]
    tally.count(op for _, op in pairs)
    launched = [
        op for c, op in pairs if c.op != COLLECTIVE and not c.graphed and op.phase != PYTHON
    ]
    tally.host.add_all(priced.launches.total(launched))
    return tally
