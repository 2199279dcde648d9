"""What each rule and assumed number buys: errors of published iterations with it switched off.

`python -m itercast.extras.published.ablation PUBLIC` runs it. Each source of measurements is
forecast by numbers and models that were made without it
(``itercast.extras.published.left_out_models``), once as it is and once without each rule
(``itercast.capture.base.switches``) and each number that states a value ``without``; for each rule,
only the rows whose first forecast ran code that reads it are forecast again. A rule is judged by
the sources that it was neither fitted nor checked on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import numpy as np
import typer

from itercast.capture.base.assumptions import Assumption, leaving_out
from itercast.capture.base.switches import RULES, start_with, switching_off
from itercast.capture.opcall import StepCapture
from itercast.compose.target import forecast_step
from itercast.eval.progress import progress_bar
from itercast.eval.results import records
from itercast.extras.imports.base import positive
from itercast.extras.processes import WORKERS, in_new_process
from itercast.extras.published.left_out import assumptions, fitted_sources
from itercast.extras.published.left_out_models import TRAINED_ON, sampled, train_without
from itercast.extras.published.models import captured_step, read_lines, row_target, timed_us
from itercast.learners.bundle import FACTS, SHIPPED
from itercast.microbench.store import Facts

log = logging.getLogger(__name__)
PAYS = 0.3  # points of the mean error, over sources that a rule was neither fitted nor checked on
SHOWN = 0.05  # points of a source's error
LIBRARIES = ["scipy.stats", "xgboost"]  # that take long to import, and know nothing of numbers
ROWS = 8  # of a process
RAN: set[CodeType] = set()  # code that forecasts of this process ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published iteration: the question, its captured step, and its measured time in us.

    It is forecast by ``bundle`` and assumed numbers that leave the source ``left_out`` out.
    """

    source: str
    asked: Facts
    step: StepCapture
    measured_us: float
    bundle: Path
    left_out: str


def read_rows(public: Path, only: str, most: int, folder: Path) -> Iterator[Row]:
    """Rows of published iterations, ``most`` of each line and source at random.

    ``only``: of lines whose name contains it. Bundles without a source are trained in ``folder``,
    if an earlier run has not done so.
    """
    fitted = fitted_sources(assumptions()) | TRAINED_ON
    bundles: dict[str, Path] = {}
    for line, table in read_lines(public, only):
        if line.part != "step" or line.fits_hosts:
            continue
        for name, mine in table[positive(table["time_us"]) > 0].groupby("source"):
            own = str(name)
            if own.casefold() in TRAINED_ON:
                bundles[own] = folder / own
                if not (bundles[own] / FACTS).exists():
                    with leaving_out(own):
                        in_new_process(train_without, own, public, bundles[own])
            for asked in records(sampled(line, mine.reset_index(drop=True), most)):
                try:
                    step = captured_step(asked, row_target(asked, SHIPPED).plan)
                except ValueError as exc:
                    log.warning("%s: not judged: %s", own, exc)
                    continue
                yield Row(
                    source=own,
                    asked=asked,
                    step=step,
                    measured_us=float(asked["time_us"]),
                    bundle=bundles.get(own, SHIPPED),
                    left_out=own if own.casefold() in fitted else "",
                )


def forecast_us(row: Row) -> float:
    """The forecast of a row in us; NaN where there is none."""
    try:
        return timed_us(row.asked, forecast_step(row.step, row_target(row.asked, row.bundle)))
    except ValueError:
        return float("nan")


def forecast_and_read(row: Row) -> tuple[float, frozenset[str]]:
    """The forecast of a row in us, and the names and texts in the code that ran for it.

    Code that ran earlier in this process counts too, as its results may be cached.
    """

    def called(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_name != "<module>":
            RAN.add(frame.f_code)

    sys.setprofile(called)
    try:
        us = forecast_us(row)
    finally:
        sys.setprofile(None)
    texts = {text for code in RAN for text in code.co_consts if isinstance(text, str)}
    return us, frozenset(texts.union(*(code.co_names for code in RAN)))


def in_processes(
    call: Callable[[Row], Any], rows: Mapping[int, Row], rule: str = ""
) -> Iterator[tuple[int, Any]]:
    """Calls a function of each row in processes that leave its source out, and switch a rule off.

    Yields (number of the row, what the call returned). A process takes ROWS rows.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    for left_out in sorted({row.left_out for row in rows.values()}):
        mine = {number: row for number, row in rows.items() if row.left_out == left_out}
        workers = min(WORKERS, ceil(len(mine) / ROWS))
        with (
            leaving_out(left_out),
            switching_off(rule),
            context.Pool(workers, start_with, (dict(os.environ),), maxtasksperchild=1) as pool,
        ):
            yield from zip(mine, pool.imap(call, mine.values(), chunksize=ROWS), strict=True)


def errors_pct(rows: Sequence[Row], found_us: Mapping[int, float]) -> dict[str, float]:
    """The mean absolute error of each source."""
    off: dict[str, list[float]] = {}
    for number, row in enumerate(rows):
        off.setdefault(row.source, []).append(abs(found_us[number] / row.measured_us - 1))
    return {source: 100 * float(np.nanmean(of_rows)) for source, of_rows in off.items()}


def switches(entries: Sequence[Assumption]) -> dict[str, Assumption | None]:
    """What can be switched off by name: rules, and numbers that state a value ``without``."""
    numbers = {f"{e.module}.{e.name}": e for e in entries if e.without is not None}
    return {**dict.fromkeys(RULES), **numbers}


def is_read(name: str, texts: Collection[str]) -> bool:
    """Whether code with these names and texts may read a rule, or a number as a constant."""
    number = name.partition(".")[2]
    return (number.upper() if number else name) in texts


def gain(
    number: Assumption | None, with_it: Mapping[str, float], without: Mapping[str, float]
) -> float:
    """Percentage points by which a rule lowers the mean error over sources that it has not seen."""
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
    verdict = "pays" if bought >= PAYS else "seen by all" if np.isnan(bought) else ""
    return f"| {name} | {bought:+.2f} | {verdict} | {', '.join(changed)} |"


def named_switches(named: Sequence[str]) -> dict[str, Assumption | None]:
    """The rules and assumed numbers with these names; all if no name is given."""
    known = switches(assumptions())
    if unknown := sorted(set(named) - set(known)):
        raise ValueError(f"unknown rule {unknown[0]!r}; known: {sorted(known)}")
    return {name: known[name] for name in named or known}


def report(rows: Sequence[Row], tried: Mapping[str, Assumption | None]) -> Iterator[str]:
    """Lines of a Markdown table of the rules ``tried``, each as soon as it is known."""
    first = dict(in_processes(forecast_and_read, dict(enumerate(rows))))
    found_us = {number: us for number, (us, _) in first.items()}
    with_it = errors_pct(rows, found_us)
    yield "errors with all rules, %: " + ", ".join(f"{s} {e:.1f}" for s, e in with_it.items())
    yield f"\n| without | points bought | >= {PAYS} | sources |\n| --- | ---: | --- | --- |"
    for name, number in tried.items():
        mine = {at: rows[at] for at, (_, texts) in first.items() if is_read(name, texts)}
        without = errors_pct(rows, found_us | dict(in_processes(forecast_us, mine, name)))
        yield line_of(name, gain(number, with_it, without), with_it, without)


def main(
    public: Annotated[Path, typer.Argument(help="folder of published measurements")],
    sample: Annotated[int, typer.Option(help="rows of each line and source")] = 2,
    line: Annotated[str, typer.Option(help="only lines whose name contains this text")] = "",
    rule: Annotated[list[str] | None, typer.Option(help="only this one; repeatable")] = None,
    work: Annotated[Path, typer.Option(help="keeps bundles")] = Path(".cache/ablate"),
) -> None:
    """Print what each rule and assumed number buys."""
    tried = named_switches(rule or ())
    with progress_bar() as bar:
        found = read_rows(public, line, sample, work)
        rows = list(bar.track(found, description="rows"))
    if not rows:
        raise ValueError(f"{str(public)!r}: no published iterations of a line named {line!r}")
    for text in report(rows, tried):
        print(text, flush=True)
