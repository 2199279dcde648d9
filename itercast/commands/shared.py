"""Steps that several commands share: sweep and fit with progress bars, tables, listings."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from itercast.capture.base.extensions import function_of
from itercast.errors import when_stopped
from itercast.eval.progress import progress_bar, rows_bar
from itercast.eval.tables import sized, three_digits
from itercast.microbench.hardware.machine import cpu_name

if TYPE_CHECKING:
    import pandas as pd

    from itercast.compose.forecast import Forecast
    from itercast.eval.results import CaseResult
    from itercast.microbench.store import Facts, Row

P = ParamSpec("P")
ROUNDS = range(12)  # of iterations that take turns on a CPU


def sweep(
    out: Path,
    device: str,
    families: Sequence[str] | None,
    budget_s: float,
    seed: int,
    torchrun: str = "",
    wanted: Path | None = None,
    devices: int = 1,
) -> int:
    """Sweep op families with a progress bar; returns the number of new rows.

    ``budget_s`` includes the seconds that earlier sweeps of this machine into ``out`` took.
    Family ``iteration``, if named, measures two rounds of whole iterations. On a CPU these ignore
    the budget.
    """
    from itercast.microbench.sweep.collect import collect
    from itercast.microbench.sweep.orders import known_families

    rows = 0
    if families and "iteration" in families:
        families = [f for f in families if f != "iteration"]
        known_families(families)
        limit_s = budget_s if device == "cuda" else math.inf
        rows = iterations(out, device, budget_s=limit_s, devices=devices)
        if not families:
            return rows
    known_families(families)  # before the bar, so that a wrong name is one line
    with rows_bar("sweep") as show:
        more = collect(out, device, families, budget_s, seed, show, torchrun, wanted, devices)
    return rows + more


def iterations(
    out: Path,
    device: str,
    names: Sequence[str] | None = None,
    budget_s: float = math.inf,
    devices: int = 1,
    rounds: range = ROUNDS,
) -> int:
    """Measure the iterations that a dataset root lacks; returns the number of new rows.

    Cases named by ``names``; without them the iterations of a campaign on a GPU, and on a CPU all
    cases that are measured by default. On a GPU twice, on a CPU in these ``rounds``, in each of
    which all take turns.
    """
    from itercast.microbench.iterations.collect import collect_iterations, usual_iterations
    from itercast.microbench.iterations.gpu_list import gpu_iterations

    on_gpu = device == "cuda" and not names
    wanted, rows = gpu_iterations() if on_gpu else usual_iterations(names), 0
    end = time.monotonic() + budget_s
    parts = [range(1), range(1, 2)] if device == "cuda" else [rounds]
    with progress_bar() as bar:
        task = bar.add_task("iterations", total=len(wanted) * sum(map(len, parts)))
        for part in parts:
            before, left_s = (part[0] - parts[0][0]) * len(wanted), end - time.monotonic()
            show = partial(_show_completed, bar, task, before)
            rows += collect_iterations(
                out, device, wanted, part[0], show, left_s, devices=devices, rounds=len(part)
            )
    return rows


def compared(
    measured: Path, names: Sequence[str] | None, bundle: Path | None
) -> tuple[pd.DataFrame, list[CaseResult]]:
    """Measured iterations and how well they are forecast.

    ``measured``: a dataset root, a file of measured steps, or a folder of such files (YAML).
    """
    from itercast.anchors import measured_steps
    from itercast.eval.compare import compare_all, compare_steps, measured_rows, step_rows
    from itercast.options import Question

    files = [measured] if measured.is_file() else sorted(measured.glob("*.yaml"))
    if not files or (measured / "iteration").is_dir():
        rows = measured_rows(measured, names)
        return rows, compare_all(rows, bundle)
    steps = {file.stem: measured_steps(file, Question, bundle) for file in files}
    if names:
        steps = {stem: [s for s in of_file if s.name in names] for stem, of_file in steps.items()}
    if not any(steps.values()):
        raise ValueError(f"measured {str(measured)!r}: no step of {', '.join(names or ())} there")
    return step_rows(steps), compare_steps(steps)


def _show_completed(bar: Progress, task: TaskID, earlier_rows: int, rows: int) -> None:
    """Advance a bar to ``rows`` of this round, beyond the rows of earlier rounds."""
    bar.update(task, completed=earlier_rows + rows)


def fit(
    data: Sequence[Path],
    out: Path,
    families: Sequence[str] | None,
    trials: int,
    into: bool = False,
    **more: Any,
) -> Row:
    """Train a bundle with a progress bar; returns the report as plain values.

    The forecasts of the held-out rows are written into the bundle's folder. ``families``: only
    these; ``trials``: of hyperparameters, per family; ``into``: ``out`` is a bundle that keeps its
    other families. ``more``: ``fit_all`` (how families are trained: in turn, or on Ray) and fields
    of ``itercast.learners.train.TrainSettings``.
    """
    from itercast.capture.base.files import write_atomic
    from itercast.eval.tracking.open_run import open_run
    from itercast.learners.bundle import Bundle, check_out
    from itercast.learners.held_out import load_held_out, save_held_out, with_others
    from itercast.learners.train import SCORES, TrainSettings, fit_in_turn, train_tables
    from itercast.learners.training_rows import usable_rows
    from itercast.learners.unfinished import forget, resumed

    check_out(out)
    kept = (Bundle.load(out), load_held_out(out)) if into else None
    others = json.loads((out / SCORES).read_text()) if into and (out / SCORES).is_file() else {}
    for root in (root for root in data if not root.is_dir()):
        raise ValueError(f"data {str(root)!r}: no such folder")
    fit_all = resumed(out, more.pop("fit_all", fit_in_turn))
    asked = TrainSettings(roots=data, trials=trials, **more)
    tables = usable_rows(data, families, asked.memory)  # bad rows are refused before a run is open
    facts = {"data": ", ".join(map(str, data)), "trials": trials, "memory_bytes": asked.memory}
    facts["version"] = version("itercast")
    stopped = f"what is trained so far is kept beside {out}; the same command goes on"
    opened = open_run(str(out), facts)
    with when_stopped(stopped), progress_bar() as bar, opened as run:
        task, begun = bar.add_task("train", total=None), list[str]()

        def on_family(name: str) -> None:
            bar.update(task, description=f"train {name}")
            run.progress("families_trained", len(begun))
            begun.append(name)

        trained = train_tables(tables, asked, out, on_family, kept[0] if kept else None, fit_all)
        run.progress("families_trained", len(trained.families))
    report, held_out = trained.to_dict(), trained.held_out()
    save_held_out(out, with_others(held_out, kept[1]) if kept else held_out)
    write_atomic(out / SCORES, json.dumps(others | report).encode())
    forget(out)
    return report


def log_training(report: Row, out: Path, data: Sequence[Path]) -> None:
    """Log a training to MLflow, after its answer, and say how long that took."""
    from itercast.eval.tracking.fits import log_fit
    from itercast.learners.bundle import Bundle

    begin, gpus = time.monotonic(), sorted(Bundle.load(out).gpus)
    device = gpus[0] if len(gpus) == 1 else "all"
    page = function_of("pages", "family")
    if log_last(log_fit, report, device, out, data, page):
        typer.echo(f"logging took {time.monotonic() - begin:.0f} s", err=True)


def log_last(write: Callable[P, object], *args: P.args, **options: P.kwargs) -> bool:
    """Log what a command has answered to MLflow, and say where; one warning if that fails."""
    from itercast.eval.tracking.open_run import attempt

    if done := attempt(write, *args, **options):
        say_logged()
    return done


def say_logged() -> None:
    """Say, as a command's last line, that it wrote to the MLflow store, and where that is."""
    from itercast.eval.tracking.store import tracking_uri

    typer.echo(f"logged to MLflow at {tracking_uri()}; `itercast ui` shows it", err=True)


def write_trace(path: Path, what: str, *forecast: object) -> None:
    """Write the timeline of ``what``: a "step" (of step and target), or a "program".

    The file is compressed where its name ends in .gz.
    """
    from itercast.capture.base.files import write_atomic

    trace = function_of("traces", what)(*forecast)
    text = json.dumps(trace.to_json(), separators=(",", ":")).encode()
    write_atomic(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def report_table(report: Row) -> Table:
    """A table of median errors on held-out shapes by family and learner, with the retest error."""
    from itercast.eval.learner_ranking import learner_table  # lazy: imports XGBoost

    lines = []
    for name, entry in report.items():
        retest_pct, coverage_pct = entry.get("retest_ape_pct"), entry.get("coverage_pct")
        facts = (
            str(entry["rows"]),
            "-" if retest_pct is None else f"{retest_pct:.1f}",
            "-" if coverage_pct is None else f"{coverage_pct:.0f}",
        )
        lines.append((name, facts, entry["learners"]))
    table = learner_table(lines, ("rows", "re-\ntest", "co-\nvered"))
    measured = [entry for entry in report.values() if entry.get("coverage_pct")]
    if measured:
        rows = sum(entry["rows"] for entry in measured)
        mean_pct = sum(entry["rows"] * entry["coverage_pct"] for entry in measured) / rows
        table.caption = (
            f"80 % intervals cover {mean_pct:.0f} % of these shapes (mean weighted by rows)"
        )
    return table


def forecast_table(
    case: str, forecast: Forecast, spread: Any = None, of: str = "", batches: str = ""
) -> Table:
    """A table of one forecast: times, rates, memory, notes; ``add_parts`` adds where time goes.

    ``spread``: distribution of the step over noisy ranks, or None; ``of``: what rates are of, such
    as " of one process"; ``batches``: how many times its batch would fit.
    """
    table = Table(title=f"{case} on {forecast.gpu}", show_header=False)
    ms = 1e-3
    table.add_row("iteration", f"{forecast.iteration_us * ms:,.2f} ms")
    low, high = forecast.iteration_us_p10 * ms, forecast.iteration_us_p90 * ms
    table.add_row("80 % interval", f"{low:,.2f} to {high:,.2f} ms")
    if (times := forecast.in_practice) > 1:
        ends = f"{low * times:,.2f} to {high * times:,.2f}"
        table.add_row("in practice", f"{forecast.iteration_us * ms * times:,.2f} ms, {ends}")
    if spread:
        table.add_row(f"slowest of {spread.ranks} ranks", spread.in_words)
    if forecast.samples_per_s:  # a script that has no DataLoader does not say
        table.add_row("samples per second", three_digits(forecast.samples_per_s) + of)
    if forecast.tokens_per_s:
        table.add_row("tokens per second", f"{forecast.tokens_per_s:,.0f}{of}")
    table.add_row("model FLOPs utilisation", f"{100 * forecast.mfu_frac:.1f} %")
    table.add_row("peak memory", sized(forecast.memory_bytes))
    if forecast.host_memory_bytes:
        table.add_row("in host memory", f"{sized(forecast.host_memory_bytes)} a GPU")
    if not forecast.fits:
        room = f"{sized(forecast.memory_room_bytes)} are left for tensors"
        reasons = filter(None, (_lacking_on_host(forecast) or room, batches))
        table.add_row(Text("does not fit", "red"), "; ".join(reasons))
    elif batches:
        table.add_row("fits", batches)
    if forecast.memory_verdict.startswith("too close"):
        table.add_row(Text("memory", "yellow"), f"{forecast.memory_verdict} (the model's error)")
    if not forecast.host and not forecast.cluster and forecast.gpu != cpu_name():
        table.add_row(
            "this machine", f"{cpu_name()}; `itercast check` says whether the bundle fits"
        )
    if forecast.cluster:
        table.add_row("split", cluster_line(forecast.cluster))
        if even_us := forecast.cluster["even_us"]:
            table.add_row("in equal shares", f"{even_us * ms:.2f} ms")
    if forecast.lengths:
        table.add_row("lengths", lengths_line(forecast.lengths))
    for note in forecast.notes:
        table.add_row("note", note)
    return table


def memory_cell(forecast: Forecast) -> Text:
    """GB of the fullest rank, with "!" where they don't fit, "?" where it is too close to tell."""
    used = f"{forecast.memory_bytes / 1e9:.1f}"
    if not forecast.fits:
        return Text(f"{used}!", "red")
    close = forecast.memory_verdict.startswith("too close")
    return Text(f"{used}?", "yellow") if close else Text(used)


def memory_legend(forecasts: Sequence[Forecast]) -> list[str]:
    """Lines that explain those marks of ``memory_cell`` that these forecasts have."""
    meanings = {"!": "more than", "?": "too close to tell whether they fit to"}
    lines = []
    for mark, meaning in meanings.items():
        marked = [r for r in forecasts if mark in memory_cell(r) and not _lacking_on_host(r)]
        rooms = sorted(r.memory_room_bytes for r in marked)
        ends = dict.fromkeys(f"{room / 1e9:.1f}" for room in (*rooms[:1], *rooms[-1:]))
        if ends:
            range_gb = " to ".join(ends)
            lines.append(f"{mark}: {meaning} the {range_gb} GB that a GPU has left for tensors")
    reasons = dict.fromkeys(filter(None, map(_lacking_on_host, forecasts)))
    return [*lines, *(f"!: {reason}" for reason in reasons)]


def _lacking_on_host(forecast: Forecast) -> str:
    """Why a plan that fits its GPUs does not fit their host's memory; "" for other plans."""
    gpu_is_full = forecast.memory_bytes > forecast.memory_room_bytes
    return "" if forecast.fits or gpu_is_full else forecast.memory_verdict.partition(": ")[2]


def surely_fits(reports: Sequence[Forecast]) -> str:
    """The fastest plan of a table whose memory is not too close to tell, in words."""
    from itercast.compose.parallel.device_memory import FITS

    sure = [r for r in reports if r.memory_verdict == FITS]
    if not sure:
        return "none of these plans surely fits"
    best = min(sure, key=lambda r: r.iteration_us)
    plan = best.plan.partition(",node=")[0]
    return f"the fastest of these that surely fits: {plan}, {best.iteration_us / 1e3:.1f} ms"


def add_parts(table: Table, forecast: Forecast) -> None:
    """Add rows: what bounds a forecast, its parts, and messages that run beside compute."""
    from itercast.compose.time_parts import NAMES, limits_in_words, time_parts

    table.add_row("bound by", limits_in_words(forecast))
    for part in time_parts(forecast):
        table.add_row(f"  {NAMES.get(part.name, part.name)}", f"{part.time_us * 1e-3:,.2f} ms")
    if (hidden_us := forecast.comm_us - forecast.exposed_comm_us) > 0:
        table.add_row("messages hidden beside compute", f"{hidden_us * 1e-3:.2f} ms")


def cluster_line(facts: Facts) -> str:
    """How a step is split over groups of unlike GPUs, in one line: samples or layers of each."""
    parts = []
    for group in facts["groups"]:
        share = f"{group['rows']} samples" if "rows" in group else f"{group['layers']} layers"
        parts.append(f"{group['group']} {share}")
    return ", ".join(parts)


def lengths_line(facts: Mapping[str, float]) -> str:
    """What sequences of unlike lengths cost, in one line."""
    return (
        f"rows of {facts['row_tokens']:.0f} tokens, {100 * facts['padding_frac']:.0f} % padding; "
        f"attention over {facts['attention_tokens']:.0f} tokens; "
        f"slowest replica {facts['imbalance']:.2f} x the mean"
    )
