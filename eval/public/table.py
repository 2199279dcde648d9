"""Run the public benchmark's op lines in parallel and print all results as a Markdown table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from itercast.eval.public.benchmark import Rows, read_folders, read_public, run_line
from itercast.eval.public.op_lines import lines
from itercast.eval.results import COVERAGE, LineResult

BASELINES = ("roofline", "alpha_beta", "interpolation", "nearest", "mlp", "nodes summed")
CALIBRATED = ("4 rows", "8 rows", "16 rows")  # itercast calibrated by rows of the held-out GPU
LEARNERS = ("itercast", "stated rate", *CALIBRATED, *BASELINES)
SPREAD = ("mape_pct", "bias_pct", "median_ape_pct", "p90_ape_pct", "worst_ape_pct")
SPREAD_NAMES = ("mean", "bias", "median", "p90", "worst")  # of itercast's errors, bias signed
WORKERS = 2


def run(public: Path, only: str = "") -> list[LineResult]:
    """Run all lines about single ops whose name contains ``only``, WORKERS at a time.

    Lines with importers of their own are left out where one of their folders is missing.
    """
    chosen = [
        (i, line)
        for i, line in enumerate(lines())
        if only in line.name and all((public / folder).exists() for folder in line.importers)
    ]
    if not chosen:
        return []
    first = {} if all(line.importers for _, line in chosen) else read_public(public)
    jobs = [
        (i, (read_folders(public, line.importers) if line.importers else first)[line.family])
        for i, line in chosen
    ]
    workers = min(WORKERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [result for results in pool.map(_line, jobs) for result in results]


def _line(job: tuple[int, Rows]) -> list[LineResult]:
    index, rows = job
    return list(run_line(lines()[index], rows))


def markdown(results: Sequence[LineResult]) -> str:
    """A Markdown table: a row per line and part with target and errors in % by learner.

    The errors of itercast follow once more as mean, signed bias, median, 90th percentile and worst;
    then the share in % of measured iterations that their 80 % intervals cover.
    """
    columns = ["line", "part", "error", "known best", "target", "met", *LEARNERS, *SPREAD_NAMES]
    columns += ["covered", "rows", "s"]
    text = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for r in results:
        ours = r.scores["itercast"]
        target = "" if r.target is None else f"{r.target:g}"
        cells = [r.line, r.part, r.metric.removesuffix("_pct"), r.known_best, target, _met(r)]
        cells += [_number(r.metric, r.scores.get(k, {}).get(r.metric)) for k in LEARNERS]
        cells += [_number(metric, ours.get(metric)) for metric in SPREAD]
        cells += [f"{ours[COVERAGE]:.0f}" if COVERAGE in ours else ""]
        text.append("| " + " | ".join([*cells, str(r.rows), f"{r.seconds:.0f}"]) + " |")
    return "\n".join(text) + "\n"


def _met(r: LineResult) -> str:
    """Say if a line meets its target: a rank correlation at least, an error or |bias| at most."""
    if r.target is None:
        return ""
    ours = r.scores["itercast"][r.metric]
    reached = ours >= r.target if r.metric == "kendall_tau" else abs(ours) <= r.target
    return "yes" if reached else "no"


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    if metric == "kendall_tau":
        return f"{value:.2f}"
    return f"{value:+.1f}" if metric == "bias_pct" else f"{value:.1f}"
