"""Leaves one source out: which forecasts still rest on it, and errors without it and with it.

A source is whoever published measurements. Its rows are left out of training, and assumptions that
were fitted on it take the values that they would have without it
(``itercast.capture.base.assumptions.leaving_out``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from itercast.capture.base.assumptions import Assumption, all_assumptions
from itercast.eval.results import COVERAGE
from itercast.extras.published.lines import LineResult
from itercast.extras.published.roles import OPS, by_role, summary
from itercast.learners.train import errors
from itercast.microbench.hardware.host import shipped_hosts

PACKAGES = ("capture", "microbench", "learners", "compose", "eval", "itercast", "extras")
LEFT_OUT, WITH_IT = "left out", "itercast"  # learners of a result
STATISTICS = ("median_ape_pct", "mape_pct", "bias_pct", "p90_ape_pct", "worst_ape_pct")
NAMES = ("median", "mean", "bias", "p90", "worst")


def assumptions(root: Path = Path(__file__).parents[2]) -> list[Assumption]:
    """Every assumption of the packages under ``root``."""
    return [one for package in PACKAGES for one in all_assumptions(root / package)]


def fitted_sources(entries: Sequence[Assumption]) -> set[str]:
    """Sources, in lower case, on which an assumption or host was fitted, or checked when chosen."""
    named = [source for one in entries for source in one.seen]
    named += [source for host in shipped_hosts() for source in host.sources]
    return {source.casefold() for source in named}


def still_fitted(source: str, entries: Sequence[Assumption]) -> list[str]:
    """Lists assumptions that keep a value fitted on a source although the source is left out."""
    return sorted(
        f"{one.module}.{one.name}"
        for one in entries
        if one.is_fitted_on(source) and one.without is None
    )


def check_source(source: str, known: Iterable[str]) -> None:
    """ValueError for a source that is not known, in any case of letters; '' is all of them."""
    names = sorted({name.casefold() for name in known})
    if source and source.casefold() not in names:
        raise ValueError(f"unknown source {source!r}; with measurements to judge: {names}")


def compared(
    what: str,
    source: str,
    measured: np.ndarray,
    without: np.ndarray,
    with_it: np.ndarray,
    seconds: float,
    covered: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> LineResult:
    """Errors on a source's rows, by forecasts without the source and with it, in one unit.

    ``covered``: ``coverage_pct`` of the intervals of each, for iterations.
    """
    scores = {
        LEFT_OUT: {**errors(without, measured), **covered[0]},
        WITH_IT: {**errors(with_it, measured), **covered[1]},
    }
    return LineResult(
        line=what,
        part=source,
        metric=STATISTICS[0],
        target=None,
        known_best="",
        rows=len(measured),
        seconds=seconds,
        scores=scores,
    )


def left_out_markdown(results: Sequence[LineResult], entries: Sequence[Assumption]) -> str:
    """Markdown tables of errors in % with a source left out and with it; biases are signed.

    Sources of iterations are apart by what they are used for (``roles``), untouched ones first,
    with a summary each. Of iterations also the share in % that their 80 % intervals cover.
    Then what is still fitted on these sources.
    """
    text: list[str] = []
    for role, mine in by_role(results, LEFT_OUT).items():
        said = "" if role == OPS else f" {summary(mine, LEFT_OUT)}"
        text += [f"Sources: {role}.{said}", "", *_table(mine), ""]
    for source in sorted({r.part for r in results}, key=str.casefold):
        names = still_fitted(source, entries)
        text += [f"Still fitted on {source}: {', '.join(names)}", ""] if names else []
    return "\n".join(text)


def _table(results: Sequence[LineResult]) -> list[str]:
    """A Markdown table: a row for each benchmark line and source that was left out.

    First the errors of forecasts without the source's data, then of those with it.
    """
    names = [*NAMES, "covered"]
    columns = ["what", "source left out", "rows", *names, *(f"{n} with it" for n in names)]
    text = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for r in results:
        cells = [r.line, r.part, str(r.rows)]
        for learner in (LEFT_OUT, WITH_IT):
            scores = r.scores[learner]
            cells += [f"{scores[s]:{'+' if s == 'bias_pct' else ''}.1f}" for s in STATISTICS]
            cells += [f"{scores[COVERAGE]:.0f}" if COVERAGE in scores else ""]
        text.append("| " + " | ".join(cells) + " |")
    return text
