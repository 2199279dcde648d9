"""The public benchmark as a whole: lines about ops and models, then errors by source left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from itercast.capture.base.files import write_atomic
from itercast.capture.plan import ParallelPlan
from itercast.eval.evaluation import Evaluation
from itercast.eval.iteration_parts import PARTS
from itercast.eval.results import COVERAGE, CaseResult, records
from itercast.extras.pages.write import write_pages
from itercast.extras.processes import processes
from itercast.extras.published.baselines import RANKERS
from itercast.extras.published.benchmark import read_folders, run_line
from itercast.extras.published.left_out import assumptions, check_source, left_out_markdown
from itercast.extras.published.left_out_models import run_models_left_out, sampled
from itercast.extras.published.left_out_ops import NAME, op_sources, run_left_out
from itercast.extras.published.lines import FIRST_FOLDERS, LineResult, Rows, model_lines, op_lines
from itercast.extras.published.models import ForecastLine, forecast_lines, judge, read_lines
from itercast.extras.software_ranking import SOFTWARE
from itercast.microbench.ops import families
from itercast.microbench.store import Facts

TOLD = ("batch", "seq", "mode", "dtype", "engine")  # settings that tell rows of a model apart
HEADING = "Errors in % on a source's rows, with the source and all that was fitted on it left out:"


BASELINES = ("roofline", "alpha_beta", "interpolation", "nearest", "nodes summed")
CALIBRATED = ("4 rows", "8 rows", "16 rows")  # itercast calibrated by rows of the held-out GPU
LEARNERS = ("itercast", "stated rate", *CALIBRATED, *BASELINES, *RANKERS)
AT_LEAST = ("kendall_tau", *SOFTWARE[:3])  # metrics whose targets are lower bounds
SPREAD = ("mape_pct", "bias_pct", "median_ape_pct", "p90_ape_pct", "worst_ape_pct")
SPREAD_NAMES = ("mean", "bias", "median", "p90", "worst")  # of itercast's errors, bias signed


def run(public: Path, only: str = "") -> list[LineResult]:
    """Run all lines about single ops whose name contains ``only``, in two processes.

    Lines with a missing folder are left out; ValueError for folders that most lines need.
    """
    chosen = [
        (i, line)
        for i, line in enumerate(op_lines())
        if only in line.name
        and (line.folders == FIRST_FOLDERS or all((public / f).exists() for f in line.folders))
    ]
    read = {x.folders: read_folders(public, x.folders) for x in dict(chosen).values()}
    jobs = [(i, read[line.folders][line.family]) for i, line in chosen]
    if not jobs:
        return []
    with processes(os.cpu_count() or 1) as pool:
        return [result for results in pool.map(_line, jobs) for result in results]


def _line(job: tuple[int, Rows]) -> list[LineResult]:
    index, rows = job
    return list(run_line(op_lines()[index], rows))


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
    """Say if a line meets its target: at least so good a ranking, an error or |bias| at most."""
    if r.target is None:
        return ""
    ours = r.scores["itercast"][r.metric]
    reached = ours >= r.target if r.metric in AT_LEAST else abs(ours) <= r.target
    return "yes" if reached else "no"


def _number(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    if metric == "kendall_tau":
        return f"{value:.2f}"
    return f"{value:+.1f}" if metric == "bias_pct" else f"{value:.1f}"


def line_names() -> list[str]:
    """Names of all lines of the benchmark, also of those with a source left out."""
    own = {x.name for x in op_lines()} | {x.name for x in model_lines()}
    return sorted(own | {NAME.format(family) for family in families()})


def report(
    public: Path, only: str, source: str, bundle: Path, out: Path
) -> tuple[Sequence[LineResult], str]:
    """Results of the lines whose name contains ``only``, and their tables.

    Pages of forecast iterations, one per GPU, are written to ``out``, and the tables as far as they
    are known: a run that is interrupted leaves them.

    With a ``source``, only errors on its rows: with the source left out, and with it. ValueError if
    it has no rows in the folder.
    """
    known, asked = op_sources(public), read_lines(public, only)
    check_source(source, {*known, *(str(s) for _, rows in asked for s in rows["source"].unique())})
    if source:
        asked = [(x, rows[rows["source"].str.casefold() == source.casefold()]) for x, rows in asked]
        asked = [(x, rows if x.calibrated else sampled(x, rows)) for x, rows in asked if len(rows)]
        asked = [(x, rows.reset_index(drop=True)) for x, rows in asked]
    results = [] if source else run(public, only)
    found = list(forecast_lines(public, asked, bundle))
    write_public_pages(out, found, bundle)
    results += [] if source else [r for x in found for r in judge(x.line, x.rows, x.seconds)]
    left_out: list[LineResult] = []
    text = "" if source else write_tables(out, results, left_out)
    without = run_left_out(public, only, source), run_models_left_out(public, found, bundle)
    for result in chain(*without):
        left_out.append(result)
        text = write_tables(out, results, left_out)
    if source and not left_out:
        raise ValueError(f"source {source!r}: no rows of it in the lines {only!r}")
    return [*results, *left_out], text


def write_tables(out: Path, results: Sequence[LineResult], left_out: Sequence[LineResult]) -> str:
    """Write the tables to ``out``/bench-public.md; returns their text."""
    parts = [markdown(results)] if results else []
    if left_out:
        parts.append(f"{HEADING}\n\n{left_out_markdown(left_out, assumptions())}")
    text = "\n".join(parts)
    write_atomic(out / "bench-public.md", text.encode())
    return text


def write_public_pages(out: Path, lines: Sequence[ForecastLine], bundle: Path) -> Path | None:
    """Write the page of every GPU with published iterations among the lines; None without any."""
    cases = {r.label + r.gpu + str(r.measured_us): r for r in map(_case, _steps(lines))}
    if not cases:
        return None
    machine = {"measured by": "others, as published", "bundle": bundle.name}
    Evaluation(results=list(cases.values()), machine=machine, bundle=str(bundle)).save(out)
    return write_pages(out)


def _steps(lines: Sequence[ForecastLine]) -> Iterator[Facts]:
    """Rows of lines about a whole step; rows that several lines share are there several times."""
    for x in lines:
        if x.line.part == "step":
            yield from records(x.rows)


def _case(row: Facts) -> CaseResult:
    """A published row as a case; it was measured once."""
    plan, measured_us = ParallelPlan.parse(str(row["plan"])), float(row["time_us"])
    told = [f"{name} {row[name]}" for name in TOLD if row.get(name)]
    model = " ".join([str(row["case"]), *told])
    parts = {name: float(row[name]) for name in PARTS}
    return CaseResult(
        case=model,
        plan=str(row["plan"]),
        model=model,
        ranks=plan.world_size,
        samples=int(row["batch"]) * plan.dp,
        predicted_us=float(row["step"]),
        predicted_us_p10=float(row["step_p10"]),
        predicted_us_p90=float(row["step_p90"]),
        measured_us=measured_us,
        rounds_us=(measured_us,),
        retest_ape_pct=None,
        by_family_us={},
        unmodelled_frac=parts["uncovered"] / float(row["step"]),
        gpu=str(row["gpu"]),
        parts_us=parts,
    )
