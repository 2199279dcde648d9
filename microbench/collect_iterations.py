"""A round of measured iterations: one process for those without a plan, torchrun for the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from microbench import store
from microbench.cases.registry import EvalCase, case, case_names
from microbench.collect import card_facts
from microbench.iteration_worker import IterationOrder, iteration_key
from microbench.iterations import Iteration
from microbench.ranks import start_ranks
from microbench.worker import finished_keys

DDP_CASES = ("mlp-m", "mlp-l", "gpt-m", "gpt-l", "vit-m", "vit-l", "dlrm-m", "dlrm-l")
PLAN_CASES = ("gpt-m", "vit-m")  # microbench.plan_iterations measures more cases and plans
PLANS = ("dp=2,zero=3", "tp=2", "pp=2,micro=4")
Progress = Callable[[int], None]


def iteration_of(chosen: EvalCase, plan: str = "") -> Iteration:
    """The case as it comes, under a plan."""
    return Iteration(case=chosen.name, batch=chosen.batch, seq=chosen.seq, plan=plan)


def usual_iterations(names: Sequence[str] | None = None) -> list[Iteration]:
    """Measured cases in one process, some under DDP on two, two of them under other plans."""
    chosen = [case(n) for n in names or case_names()]
    chosen = [c for c in chosen if c.measured or names]
    both = [c for c in chosen if c.name in DDP_CASES]
    planned = [iteration_of(c, p) for c in chosen if c.name in PLAN_CASES for p in PLANS]
    alone = [iteration_of(c) for c in chosen]
    return [*alone, *(iteration_of(c, "dp=2") for c in both), *planned]


def collect_iterations(
    root: Path,
    device: str,
    wanted: Sequence[Iteration],
    repeat: int,
    progress: Progress | None = None,
) -> int:
    """Measure what has no row of this repeat under ``root`` yet; returns the number of new rows.

    On a CPU the ranks of a plan share its cores.
    """
    facts = {**card_facts(root, device), "what": "training iterations measured by itercast collect"}
    gpu = facts["hardware"]["name"]
    store.compact(root, facts)
    done = finished_keys(root, ("iteration",))
    cores = os.cpu_count() or 1
    moved = 0
    for ranks in sorted({w.ranks for w in wanted}):
        order = IterationOrder(
            root=str(root),
            run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-i{repeat}-r{ranks}",
            device=device,
            gpu=gpu,
            threads=max(1, cores // ranks) if device == "cpu" else 1,
            ranks=ranks,
            repeat=repeat,
            iterations=(),
        )
        mine = [w for w in wanted if w.ranks == ranks and iteration_key(order, w) not in done]
        if mine:
            _run(replace(order, iterations=tuple(mine)), moved, progress)
            moved += store.compact(root, facts)
    return moved


def _run(order: IterationOrder, before: int, progress: Progress | None) -> None:
    """One group of processes; ValueError where it failed, rows it finished are kept."""
    process = start_ranks("microbench.iteration_worker", asdict(order), order.ranks)
    journal = Path(order.root) / ".journal" / f"{order.run_id}.jsonl"
    while process.poll() is None:
        time.sleep(0.2)
        if progress and journal.is_file():
            progress(before + journal.read_bytes().count(b"\n"))
    if process.returncode != 0:
        finished = journal.read_bytes().count(b"\n") if journal.is_file() else 0
        stuck = order.iterations[min(finished, len(order.iterations) - 1)]
        raise RuntimeError(f"measuring {stuck.case} {stuck.plan} failed; its output is above")
