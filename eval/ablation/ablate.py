"""What each rule and assumed number buys: errors of published iterations with it switched off.

`python -m itercast.eval.ablation PUBLIC` runs it. Each source of measurements is forecast by
numbers and models that were made without it (``itercast.eval.public.left_out_models``), once as it
is and once without each rule (``itercast.microbench.switches``) and each number that states a value
``without``. A rule is judged by the sources that it was neither fitted nor checked on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from itercast.compose.target import forecast_step
from itercast.eval.processes import in_new_process, processes
from itercast.eval.public.left_out import assumptions, fitted_sources
from itercast.eval.public.left_out_models import TRAINED_ON, sampled, train_without
from itercast.eval.public.lines import Rows
from itercast.eval.public.models import captured_step, read_lines, row_target, timed_us
from itercast.eval.results import records
from itercast.learners.bundle import SHIPPED
from itercast.microbench.assumptions import Assumption, leaving_out
from itercast.microbench.importers.base import positive
from itercast.microbench.opcall import StepCapture
from itercast.microbench.store import Facts
from itercast.microbench.switches import RULES, switching_off

log = logging.getLogger(__name__)
PAYS = 0.3  # points of the mean error, over sources that a rule was neither fitted nor checked on
SHOWN = 0.05  # points of a source's error


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published iteration: what was asked, its captured step, and its measured time in us."""

    asked: Facts
    step: StepCapture
    measured_us: float


@dataclass(slots=True)
class Source:
    """A source's rows, the bundle that forecasts them, and what to leave out of its numbers."""

    name: str
    bundle: Path
    left_out: str
    rows: list[Row] = field(default_factory=list)


def read_sources(public: Path, only: str, most: int, folder: Path) -> list[Source]:
    """The sources of iterations in a folder, with ``most`` rows of each line at random.

    ``only``: of lines whose name contains it. Bundles without a source are trained in ``folder``.
    """
    fitted = fitted_sources(assumptions()) | TRAINED_ON
    found: dict[str, Source] = {}
    for line, rows in read_lines(public, only):
        if line.part != "step" or line.fits_hosts:
            continue
        for name, mine in rows[positive(rows["time_us"]) > 0].groupby("source"):
            own = str(name)
            if own not in found:
                bundle = SHIPPED
                if own.casefold() in TRAINED_ON:
                    with leaving_out(own):
                        bundle = in_new_process(train_without, own, public, folder / own)
                left_out = own if own.casefold() in fitted else ""
                found[own] = Source(own, bundle, left_out)
            some = sampled(line, mine.reset_index(drop=True), most)
            found[own].rows += captured(some)
    return [source for source in found.values() if source.rows]


def captured(rows: Rows) -> Iterator[Row]:
    """The rows whose step can be captured and forecast."""
    for asked in records(rows):
        try:
            step = captured_step(asked, row_target(asked, SHIPPED).plan)
        except ValueError as exc:
            log.warning("%s: not judged: %s", asked["source"], exc)
            continue
        yield Row(asked=asked, step=step, measured_us=float(asked["time_us"]))


def errors_pct(sources: Sequence[Source], rule: str) -> dict[str, float]:
    """The mean absolute error of each source without a rule; '' is with all rules."""
    found: dict[str, float] = {}
    for left_out in sorted({source.left_out for source in sources}):
        mine = [source for source in sources if source.left_out == left_out]
        with (
            leaving_out(left_out),
            switching_off(rule),
            processes() as pool,
        ):
            jobs = [(source.bundle, row) for source in mine for row in source.rows]
            times = iter(list(pool.map(forecast_us, jobs, chunksize=4)))
        for source in mine:
            off = [abs(next(times) / row.measured_us - 1) for row in source.rows]
            found[source.name] = 100 * float(np.nanmean(off))
    return found


def forecast_us(job: tuple[Path, Row]) -> float:
    """The forecast of a row in us; NaN where there is none."""
    bundle, row = job
    try:
        return timed_us(row.asked, forecast_step(row.step, row_target(row.asked, bundle)))
    except ValueError:
        return float("nan")


def switches(entries: Sequence[Assumption]) -> dict[str, Assumption | None]:
    """What can be switched off by name: rules, and numbers that state a value ``without``."""
    numbers = {f"{e.module}.{e.name}": e for e in entries if e.without is not None}
    return {**dict.fromkeys(RULES), **numbers}


def gain(
    number: Assumption | None, with_it: Mapping[str, float], without: Mapping[str, float]
) -> float:
    """Points by which a rule lowers the mean error over the sources that it has not seen."""
    blind = [s for s in with_it if number is None or not number.is_fitted_on(s)]
    return float(np.mean([without[s] - with_it[s] for s in blind])) if blind else float("nan")


def line_of(
    name: str, bought: float, with_it: Mapping[str, float], without: Mapping[str, float]
) -> str:
    """A row of the table: what a rule buys in all, and each source's error without it."""
    changed = [
        f"{source} {with_it[source]:.1f} -> {without[source]:.1f}"
        for source in sorted(with_it, key=lambda s: with_it[s] - without[s])
        if abs(without[source] - with_it[source]) >= SHOWN
    ]
    verdict = "pays" if bought >= PAYS else "unseen by none" if np.isnan(bought) else ""
    return f"| {name} | {bought:+.2f} | {verdict} | {', '.join(changed)} |"


def report(sources: Sequence[Source], named: Sequence[str]) -> Iterator[str]:
    """Lines of a Markdown table, each as soon as it is known; ``named``: only these rules."""
    known = switches(assumptions())
    if unknown := sorted(set(named) - set(known)):
        raise ValueError(f"unknown rule {unknown[0]!r}; known: {sorted(known)}")
    with_it = errors_pct(sources, "")
    yield "errors with all rules, %: " + ", ".join(f"{s} {e:.1f}" for s, e in with_it.items())
    yield f"\n| without | points bought | >= {PAYS} | sources |\n| --- | ---: | --- | --- |"
    for name in named or known:
        without = errors_pct(sources, name)
        yield line_of(name, gain(known[name], with_it, without), with_it, without)


def main(
    public: Annotated[Path, typer.Argument(help="folder of published measurements")],
    sample: Annotated[int, typer.Option(help="rows of each line and source")] = 2,
    line: Annotated[str, typer.Option(help="only lines whose name contains this text")] = "",
    rule: Annotated[list[str] | None, typer.Option(help="only this one; repeatable")] = None,
    work: Annotated[Path, typer.Option(help="for bundles")] = Path(".cache/ablate"),
) -> None:
    """Print what each rule and assumed number buys."""
    for text in report(read_sources(public, line, sample, work), rule or ()):
        print(text, flush=True)
