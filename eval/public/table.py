"""Run the public benchmark's op lines in parallel and print all results as a Markdown table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from eval.public.benchmark import Rows, read_public, run_line
from eval.public.op_lines import lines
from eval.results import LineResult

BASELINES = ("roofline", "alpha_beta", "interpolation", "nearest", "mlp", "nodes summed")
CALIBRATED = ("4 rows", "8 rows", "16 rows")  # itercast calibrated by rows of the held-out GPU
LEARNERS = ("itercast", "stated rate", *CALIBRATED, *BASELINES)
WORKERS = 2


def run(public: Path, only: str = "") -> list[LineResult]:
    """Run all lines about single ops whose name contains ``only``, WORKERS at a time."""
    chosen = [i for i, line in enumerate(lines()) if only in line.name]
    if not chosen:
        return []
    rows = read_public(public)
    jobs = [(i, rows[lines()[i].family]) for i in chosen]
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        return [result for results in pool.map(_line, jobs) for result in results]


def _line(job: tuple[int, Rows]) -> list[LineResult]:
    index, rows = job
    return list(run_line(lines()[index], rows))


def markdown(results: Sequence[LineResult]) -> str:
    """A Markdown table: a row per line and part with target and errors in % by learner."""
    head = "| line | part | error | known best | target | met | "
    text = [head + " | ".join(LEARNERS) + " | rows | s |"]
    text.append("|" + " --- |" * (len(LEARNERS) + 8))
    for r in results:
        ours = r.scores["itercast"][r.metric]
        tau = r.metric == "kendall_tau"  # the only one that is better the larger it is
        reached = r.target is not None and (ours >= r.target if tau else ours <= r.target)
        met = "" if r.target is None else "yes" if reached else "no"
        found = [r.scores.get(k, {}).get(r.metric) for k in LEARNERS]
        scores = ["" if x is None else f"{x:.2f}" if tau else f"{x:.1f}" for x in found]
        target = "" if r.target is None else f"{r.target:g}"
        cells = [r.line, r.part, r.metric.removesuffix("_pct"), r.known_best, target, met]
        text.append("| " + " | ".join([*cells, *scores, str(r.rows), f"{r.seconds:.0f}"]) + " |")
    return "\n".join(text) + "\n"
