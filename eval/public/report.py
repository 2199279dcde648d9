"""The public benchmark as a whole: lines about ops and models, then errors by source left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.public.left_out import assumptions, check_source, left_out_markdown
from eval.public.left_out_models import run_models_left_out, sampled
from eval.public.left_out_ops import NAME, op_sources, run_left_out
from eval.public.model_lines import model_lines
from eval.public.models import forecast_lines, judge, read_lines
from eval.public.op_lines import lines
from eval.public.table import markdown, run
from eval.results import LineResult
from microbench.ops import families

HEADING = "Errors in % on a source's rows, with the source and all that was fitted on it left out:"


def line_names() -> list[str]:
    """Names of all lines of the benchmark, also of those with a source left out."""
    own = {x.name for x in lines()} | {x.name for x in model_lines()}
    return sorted(own | {NAME.format(family) for family in families()})


def report(public: Path, only: str, source: str, bundle: Path) -> tuple[Sequence[LineResult], str]:
    """Results of the lines whose name contains ``only``, and their tables.

    With a ``source`` only errors on its rows, with it left out and with it; ValueError for one that
    has no rows in the folder.
    """
    asked, known = read_lines(public, only), op_sources(public)
    check_source(source, {*known, *(str(s) for _, rows in asked for s in rows["source"].unique())})
    if source:
        asked = [(x, rows[rows["source"].str.casefold() == source.casefold()]) for x, rows in asked]
        asked = [(x, rows if x.calibrated else sampled(rows)) for x, rows in asked if len(rows)]
        asked = [(x, rows.reset_index(drop=True)) for x, rows in asked]
    results = [] if source else run(public, only)
    found = list(forecast_lines(public, asked, bundle))
    results += [] if source else [r for x in found for r in judge(x.line, x.rows, x.seconds)]
    left_out = list(run_left_out(public, only, source))
    left_out += run_models_left_out(public, found, bundle)
    if source and not left_out:
        raise ValueError(f"source {source!r}: no rows of it in the lines {only!r}")
    parts = [markdown(results)] if results else []
    if left_out:
        parts.append(f"{HEADING}\n\n{left_out_markdown(left_out, assumptions())}")
    return [*results, *left_out], "\n".join(parts)
