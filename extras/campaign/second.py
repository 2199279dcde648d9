"""Stages of the second campaign: hosts, points that models call, steps seen from inside, copies."""

from __future__ import annotations

import os
import random
import time
from dataclasses import asdict
from pathlib import Path

from itercast.extras.campaign.prepare import point_of_row
from itercast.extras.campaign.run import Run
from itercast.extras.campaign.steady import SUSTAINED, TRANSFER, SteadyOrder
from itercast.extras.kineto.in_step import OPS
from itercast.microbench import store
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.gpu_list import iterations_of, write_configurations
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Point
from itercast.microbench.processes.ranks import start_ranks
from itercast.microbench.processes.watch import log_tail, watch
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.scheduler import finished_keys

ROUNDS = 3  # of the iterations whose pace the host sets
EVENTS_FRAC = 0.25  # of the hosts' stage, for single events, those of parallel wrappers among them
CORES = 4  # that each of their processes is pinned to
STALLED_S = 60.0  # without a row: the GPU hangs
ALONE_FRAC = 0.5  # of a stage's time, for ops alone; the rest in steps, or sustained
CALLS_FRAC = 0.6  # of the optimizers' stage, for their calls; the rest for whole steps
SHAPED = ("conv", "norm", "pooling")


def hosts(run: Run, budget_s: float, grace_s: float) -> int:
    """Stage "hosts": time host events, then steps that the host bounds; returns the number of rows.

    Each round has another order and an equal share of the time left; processes are pinned.
    """
    end_s = time.monotonic() + budget_s
    rows = run.sweep(("host",), EVENTS_FRAC * budget_s, grace_s, None)
    for repeat in range(ROUNDS):
        shuffled = iterations_of("hosts")
        random.Random(f"{run.seed} {repeat}").shuffle(shuffled)
        left_s = (end_s - time.monotonic()) / (ROUNDS - repeat)
        rows += collect_iterations(
            run.root, "cuda", shuffled, repeat, run.progress, left_s, grace_s, cores=CORES
        )
    return rows


def products(run: Run, budget_s: float, grace_s: float) -> int:
    """Sweep products of the campaign's file, then let the largest ones run for seconds."""
    end_s = time.monotonic() + budget_s
    rows = run.sweep(("gemm",), ALONE_FRAC * budget_s, grace_s, run.points)
    return rows + _steady(run, SUSTAINED, end_s - time.monotonic(), grace_s)


def optimizers(run: Run, budget_s: float, grace_s: float) -> int:
    """Sweep optimizer calls of the campaign's file; then whole steps, some in CUDA graphs."""
    end_s = time.monotonic() + budget_s
    rows = run.sweep(("optimizer",), CALLS_FRAC * budget_s, grace_s, run.points)
    return rows + _iterations(run, "optimizers", end_s - time.monotonic(), grace_s)


def traces(run: Run, budget_s: float, grace_s: float) -> int:
    """Profile iterations op by op; then measure the same ops alone."""
    end_s = time.monotonic() + budget_s
    profiled, in_step_s = iterations_of("traces"), (1 - ALONE_FRAC) * budget_s
    rows = collect_iterations(
        run.root, "cuda", profiled, 0, run.progress, in_step_s, grace_s, in_step=True
    )
    path = run.root / ".journal/points-in-step.json"
    if not write_points_of_steps(run.root, path):
        return rows
    return rows + run.sweep(None, end_s - time.monotonic(), grace_s, path)


def write_points_of_steps(root: Path, path: Path) -> int:
    """Write the ops of profiled steps as points, those that steps spend most time in first."""
    rows = store.read_rows([root], OPS)
    points_by_family: dict[str, list[Point]] = {}
    if len(rows):
        rows = rows.assign(step_us=rows["time_us"] * rows["calls"])
        rows = rows.sort_values("step_us", ascending=False, kind="stable")
        for name, ops_of_family in rows.groupby("of"):
            family = families()[str(name)]
            points = [point_of_row(family, row) for row in ops_of_family.to_dict("records")]
            points_by_family[str(name)] = list(dict.fromkeys(points))
        write_points(path, points_by_family)
    return sum(map(len, points_by_family.values()))


def held_out(run: Run, budget_s: float, grace_s: float) -> int:
    """Measure iterations of networks that nothing was swept for."""
    write_configurations(run.root)
    return _iterations(run, "held_out", budget_s, grace_s)


def transfers(run: Run, budget_s: float, grace_s: float) -> int:
    """Measure copies between host and GPU and within it, alone and beside a product."""
    return _steady(run, TRANSFER, budget_s, grace_s)


def _iterations(run: Run, stage: str, budget_s: float, grace_s: float) -> int:
    """Measure the iterations of a stage, each once; returns the number of rows."""
    listed = iterations_of(stage)
    return collect_iterations(run.root, "cuda", listed, 0, run.progress, budget_s, grace_s)


def _steady(run: Run, kind: str, budget_s: float, grace_s: float) -> int:
    """Run the worker of ``steady`` for a kind of jobs; returns the number of new rows."""
    begin_s, facts = time.monotonic(), card_facts(run.root, "cuda")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{kind}"
    order = SteadyOrder(
        root=str(run.root),
        run_id=run_id,
        device="cuda",
        gpu=facts["hardware"]["name"],
        threads=0,
        ranks=1,
        begin_s=begin_s,
        kind=kind,
        budget_s=budget_s,
        points=str(run.points or ""),
        done=tuple(finished_keys(run.root, (kind,))),
    )
    printed = run.root / "logs" / f"{run_id}.log"
    process = start_ranks("itercast.extras.campaign.steady", asdict(order), 1, log=printed)
    journal = run.root / ".journal" / f"{run_id}.jsonl"

    def progress() -> int:
        run.progress()
        return journal.stat().st_size if journal.is_file() else 0

    ended = watch(process, progress, lambda: STALLED_S, begin_s + budget_s + grace_s)
    if process.returncode:
        run.note(f"{kind}: {ended}, code {process.returncode}: {log_tail(printed)}")
    return store.compact(run.root, facts)
