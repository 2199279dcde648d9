"""Measures a list of iterations: in one process without a plan, under torchrun with one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from itercast.capture.cases.registry import EvalCase, case, case_names
from itercast.microbench import store
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.iterations.worker import (
    IN_STEP,
    IterationOrder,
    iteration_key,
    iteration_row,
)
from itercast.microbench.processes.lanes import run_lanes
from itercast.microbench.processes.ranks import start_ranks, threads_of
from itercast.microbench.processes.watch import EXIT_BROKEN, log_tail, never, watch
from itercast.microbench.store import Row
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.rows import new_run_id
from itercast.microbench.sweep.scheduler import finished_keys

log = logging.getLogger(__name__)
DDP_CASES = ("mlp-m", "mlp-l", "gpt-m", "gpt-l", "vit-m", "vit-l", "dlrm-m", "dlrm-l")
STALLED_S = {"eager": 60.0, "graph": 60.0}  # without a row: the GPU hangs
STALLED_S |= {"compile": 240.0, "compile+graph": 240.0}
GRACE_S = 15.0  # of a worker after its budget, before it is killed
Progress = Callable[[int], None]


def iteration_of(chosen: EvalCase, plan: str = "") -> Iteration:
    """Describes an iteration of a case with its default batch and settings, under a plan."""
    return Iteration(case=chosen.name, batch=chosen.batch, seq=chosen.seq, plan=plan)


def usual_iterations(names: Sequence[str] | None = None) -> list[Iteration]:
    """The iterations that are measured by default: cases in one process, some also under dp=2.

    ``itercast.extras.benchmarks.plan_list`` has other plans.
    """
    chosen = [case(n) for n in names or case_names()]
    chosen = [c for c in chosen if c.measured or names]
    replicated = [c for c in chosen if c.name in DDP_CASES]
    return [*(iteration_of(c) for c in chosen), *(iteration_of(c, "dp=2") for c in replicated)]


def collect_iterations(
    root: Path,
    device: str,
    wanted: Sequence[Iteration],
    repeat: int,
    progress: Progress | None = None,
    budget_s: float = math.inf,
    grace_s: float = GRACE_S,
    devices: int = 1,
    *,
    in_step: bool = False,
    cores: int = 0,
    rounds: int = 1,
) -> int:
    """Measure the iterations without a row of this repeat; returns the number of new rows.

    On a CPU the ranks of a plan share its cores, and in so many ``rounds``, of which each has a
    repeat of its own, all iterations take turns. On a GPU the budget is wall time, starts of
    workers included: no iteration is begun that would exceed it, an iteration that ends its process
    gets an error row, and a worker is killed ``grace_s`` after the budget. ``devices``: GPUs that
    share the iterations of one process. ``in_step``: steps are profiled, and each of their ops
    becomes a row; ``cores``: that each process is pinned to.
    """
    end_s = time.monotonic() + budget_s
    facts = {**card_facts(root, device), "what": "training iterations measured by itercast collect"}
    store.compact(root, facts)
    done = finished_keys(root, ("iteration", IN_STEP))
    new_rows = 0
    for ranks in sorted({iteration.ranks for iteration in wanted}):
        order = _order(root, device, facts["hardware"]["name"], ranks, repeat)
        order = replace(order, in_step=in_step, cores=cores, rounds=rounds)
        keys = {i: row_keys(order, i) for i in wanted if i.ranks == ranks}
        left = [iteration for iteration, of_rounds in keys.items() if not of_rounds <= done]
        had = done.intersection(key for iteration in left for key in keys[iteration])
        order = replace(order, done=tuple(had))
        order = replace(order, lanes=min(devices, len(left)) if ranks == 1 and left else 1)
        measure = partial(_measure, order, left, end_s, grace_s)
        try:
            run_lanes(order.lanes, measure, partial(_show, progress, new_rows))
        finally:
            new_rows += store.compact(root, facts)
    return new_rows


def row_keys(order: IterationOrder, iteration: Iteration) -> set[str]:
    """Keys of an iteration's rows, one for each round."""
    repeats = range(order.repeat, order.repeat + order.rounds)
    return {iteration_key(replace(order, repeat=repeat), iteration) for repeat in repeats}


def _show(progress: Progress | None, earlier_rows: int, rows_by_lane: Sequence[int]) -> None:
    """Tell the number of rows of all lanes and of groups of ranks before."""
    if progress:
        progress(earlier_rows + sum(rows_by_lane))


def _measure(
    order: IterationOrder,
    wanted: Sequence[Iteration],
    end_s: float,
    grace_s: float,
    lane: int,
    progress: Progress,
) -> None:
    """Measure this lane's iterations; starts another process where one ends early."""
    order = replace(order, lane=lane)
    waiting, finished = list(wanted[lane :: order.lanes]), 0
    while waiting and (left_s := end_s - (begin_s := time.monotonic())) > 0:
        run_id = new_run_id(f"i{order.repeat}-r{order.ranks}-{order.lane}")
        part = replace(order, iterations=tuple(waiting), run_id=run_id)
        part = replace(part, budget_s=left_s, begin_s=begin_s)
        ended, code, rows = _run(part, finished, progress, grace_s)
        left = len(waiting) * order.rounds - len(order.done) - rows
        if code == 0 or ended == "late" or not left:  # gloo may abort when ranks end
            return
        finished, waiting = finished + rows, waiting[rows:]
        if order.device == "cpu":
            raise RuntimeError("measuring iterations failed; see above")
        if code != EXIT_BROKEN:  # the process crashed or hung
            _write_failure(part, waiting.pop(0), code)
            finished += 1


def _order(root: Path, device: str, gpu: str, ranks: int, repeat: int) -> IterationOrder:
    """The order to workers with this number of ranks, without iterations and budget."""
    return IterationOrder(
        root=str(root),
        run_id="",
        device=device,
        gpu=gpu,
        threads=threads_of(ranks) if device == "cpu" else 0,
        ranks=ranks,
        repeat=repeat,
        iterations=(),
    )


def _write_failure(order: IterationOrder, culprit: Iteration, code: int) -> None:
    """Write an error row for the iteration during which the process ended."""
    failed: Row = {"status": "error", "reason": f"its process ended with code {code}"}
    failed |= {"gpu_uuid": None, "gpu_index": None}  # this process sees other GPUs than a lane
    journal = store.Journal(Path(order.root), f"{order.run_id}-mark")
    journal.append([iteration_row(order, culprit, failed)])
    journal.close()


def _run(
    order: IterationOrder, before: int, progress: Progress, grace_s: float
) -> tuple[str, int, int]:
    """Run a process or a group of ranks; returns how it ended, exit code, iterations finished."""
    on_gpu = order.device == "cuda"
    printed = order.printed if on_gpu else None
    process = start_ranks(
        "itercast.microbench.iterations.worker", asdict(order), order.ranks, log=printed
    )

    def rows() -> int:
        finished = order.rows()
        progress(before + finished)
        return finished

    def stalled_s() -> float:
        return STALLED_S[order.iterations[min(rows(), len(order.iterations) - 1)].engine]

    until_s = order.begin_s + order.budget_s + grace_s
    ended = watch(process, rows, stalled_s if on_gpu else never, until_s if on_gpu else math.inf)
    code = int(process.returncode)
    if code != 0:
        store.check_room(Path(order.root))
    if printed and code not in (0, EXIT_BROKEN):
        log.warning("iterations: %s, code %d: %s", ended, code, log_tail(printed))
    return ended, code, rows()
