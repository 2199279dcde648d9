"""The command ``itercast plan``: search the best parallel plans of a model on a number of GPUs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from itercast.capture.base.durations import counted
from itercast.capture.base.extensions import function_of
from itercast.capture.base.slow_imports import without_scikit_learn
from itercast.capture.plan import ParallelPlan
from itercast.commands.script_case import AsModule, model_lines, searched
from itercast.eval.tables import headed, print_tables, three_digits
from itercast.options import (
    Cluster,
    GpuName,
    Gpus,
    Json,
    NodeName,
    Prices,
    Question,
    asks,
    prints_aside,
    warn_of_dtype,
)
from itercast.outputs import in_a_folder
from itercast.stated import assumes, command, say, settings, unusual

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.compose.forecast import Forecast
    from itercast.compose.plan_search.candidates import Search
    from itercast.compose.target import Target
    from itercast.microbench.hardware.spec import Gpu
    from itercast.microbench.store import Facts, Row

BAR = 8  # characters of a waterfall
STEP = ("dtype", "optimizer", "channels_last", "lora")  # options that say what a step is
WHERE = ("seq", "bundle", "host", "stack")
MACHINE = ("machine", "anchor")
SIZE = ("batch", "global_batch")
PARTS: tuple[tuple[str, str, str], ...] = (  # name, mark and colour of Forecast.lanes_us, in order
    ("compute", "█", "green"),
    ("exposed comm", "▓", "red"),
    ("bubble", "▒", "yellow"),
    ("host gaps", "░", "cyan"),
    ("waiting", "·", "magenta"),
)


@partial(
    asks, only=("case", "hf_config", "model", "lengths", "packed", *SIZE, *STEP, *WHERE, *MACHINE)
)
def plan(
    question: Question,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="of a script in place of CASE; after -- all are")
    ] = None,
    module: AsModule = False,
    gpu: GpuName = "",
    gpus: Gpus = None,
    cluster: Cluster = None,
    objective: Annotated[str, typer.Option(help="what to minimise: time, cost or memory")] = "time",
    node: NodeName = "",
    amp: Annotated[
        bool, typer.Option("--amp", help="mixed precision: weights in fp32, autocast to dtype")
    ] = False,
    local: Annotated[
        int, typer.Option(min=0, help="also try local SGD that averages every so many steps")
    ] = 0,
    prices: Prices = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="HTML page to write: time against memory and cost of all plans tried, and more",
            dir_okay=False,
            callback=in_a_folder,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search parallel plans; prints the best ten and where time goes; logs to MLflow.

    CASE may be a training script, as of `itercast run`: the plans are of the model that it trains.
    """
    begin, unlike = time.perf_counter(), {n: getattr(question, n) for n in ("lengths", "packed")}
    asked: Row = {name: getattr(question, name) for name in (*STEP, *WHERE)} | {"amp": amp}
    if cluster is not None:
        alone = not (gpu or gpus or node or any(unlike.values()) or local or objective != "time")
        alone = alone and not (question.machine or question.anchor)
        print_plans(*_on_cluster(question, cluster, asked, begin, alone=alone), as_json, prices)
        return
    if not gpu or gpus is None:
        raise ValueError("plan takes --gpu and --gpus, or --cluster")
    facts: Row = {"case": question.name, "gpu": gpu, "gpus": gpus, "objective": objective}
    facts |= {"node": node, "local": local, **unlike, **asked}
    how: Row = {"gpus": gpus, "module": module}
    with searched(question, gpu, node, arguments or [], **how) as (model, script):
        facts |= {**script, "module": module}
        facts, reports = _search_model(question, model, facts, page, prices)
    facts["seconds"] = time.perf_counter() - begin
    print_plans(facts, reports, as_json, prices)


def _unusual(facts: Row, plan: ParallelPlan, gpu: Gpu) -> list[str]:
    """What is unusual about the step, in lines for the user.

    A script in fp32 that lets torch round products to TF32 is taken as one in tf32.
    """
    most_products = facts.get("script", {}).get("products", [""])[:1]
    dtype = "tf32" if facts["dtype"] == "fp32" and most_products == ["tf32"] else facts["dtype"]
    return unusual({**facts, "dtype": dtype}, {}, plan, gpu)


def _search_model(
    question: Question, model: Any, facts: Row, page: Path | None, prices: Path | None
) -> tuple[Row, list[Forecast]]:
    """Search the plans of a model; returns all options with their values, and the best forecasts.

    ``facts``: the options asked for; those not given get the values that the search took.
    """
    gpu, gpus, asked = facts["gpu"], facts["gpus"], {n: facts[n] for n in (*STEP, *WHERE, "amp")}
    samples, where = question.samples_over(gpus), {n: facts[n] for n in ("node", "local")}
    on_machine = {"machine": question.known_machine()}
    search, target = _open(model, gpu, gpus, global_batch=samples, **where, **asked, **on_machine)
    if prices is not None:
        from itercast.compose.prices import prices_of

        prices_of(prices, [target.gpu.name])  # ValueError before the search
    settled = {"global_batch": search.batch, "seq": search.seq, "dtype": search.dtype}
    settled |= {"optimizer": search.optimizer, "bundle": target.bundle_name}
    facts |= {"amp": search.amp, "stack": target.stack, **settled}
    facts["command"] = _command(question, facts)
    plan = ParallelPlan(dp=gpus, node=where["node"])
    facts["unusual"] = _unusual(facts, plan, target.gpu)
    counts, reports = run_search(search, facts, page)
    facts["unusual"] += filter(None, [search.left_out()])
    unlike = {name: facts[name] for name in ("lengths", "packed")}
    if any(unlike.values()):
        sizes = {"batch": search.batch, "seq": search.seq, "node": where["node"], **unlike}
        reports = with_lengths(model, reports, gpu=gpu, **{**asked, **sizes, **on_machine})
    return facts | {"gpu": target.gpu.name, **counts}, reports


def _command(question: Question, facts: Row) -> str:
    """The command line that repeats a search, with the values of all options."""
    named = {n: getattr(question, n) for n in ("case", "hf_config", "model", *MACHINE)}
    line = command("plan", {n: v for n, v in {**facts, **named}.items() if v and n != "script"})
    of_script = facts.get("script", {}).get("arguments", [])
    return f"{line} -- {shlex.join(of_script)}" if of_script else line


def _open(model: Any, gpu: str, gpus: int, **options: Any) -> tuple[Search, Target]:
    """Capture the model and prepare the search; also the target: GPU, bundle and such."""
    with prints_aside(), without_scikit_learn():
        from itercast.compose.plan_search.open_search import open_search

        search, target = open_search(model, gpu, gpus, **options)
    warn_of_dtype(search.dtype, target)
    return search, target


def _on_cluster(
    question: Question, path: Path, asked: Row, begin: float, *, alone: bool
) -> tuple[Row, list[Forecast]]:
    """All options with their values, and forecasts of the best plans on a cluster file's GPUs.

    ``begin``: when the command began; ``alone``: no option was given that excludes --cluster.
    """
    if not alone:
        excluded = "--gpu, --gpus, --node, --lengths, --packed, --local or --objective"
        raise ValueError(f"--cluster goes without {excluded}")

    with prints_aside(), without_scikit_learn():
        forecasts, settled, counts = function_of("unlike_gpus", "plan")(question, path, asked)
    line = _command(question, {"cluster": path, **settled})
    facts = {"case": question.name, "gpu": path.stem, "objective": "time", "unusual": []}
    facts |= {**settled, **counts, "command": line}
    return {**facts, "seconds": time.perf_counter() - begin}, forecasts


def with_lengths(
    model: Any, reports: Sequence[Forecast], *, batch: int, node: str, amp: bool, **options: Any
) -> list[Forecast]:
    """Forecast plans anew with sequences of unlike lengths; returns them fastest first.

    Plans that need equal lengths are left out; ValueError if all do. ``amp`` and ``node`` are part
    of the plans.
    """
    from itercast.capture.plan import ParallelPlan
    from itercast.compose.predict import predict

    forecasts: list[Forecast] = []
    refused = ""
    for report in reports:
        replica = batch // ParallelPlan.parse(report.plan).dp
        try:
            forecasts.append(predict(model, plan=report.plan, batch=replica, **options))
        except ValueError as exc:
            refused = refused or str(exc)
    if not forecasts:
        raise ValueError(refused)
    return sorted(forecasts, key=lambda forecast: (not forecast.fits, forecast.iteration_us))


def print_plans(
    facts: Row, reports: Sequence[Forecast], as_json: bool, prices: Path | None = None
) -> None:
    """Print the plans as a table or as one JSON object, then log them to MLflow."""
    from itercast.commands.shared import log_last
    from itercast.compose.prices import bill
    from itercast.eval.tracking.logs import log_plans

    bills = [bill(r, prices) if prices else {} for r in reports]
    priced = zip(reports, bills, strict=True)
    plain = [asdict(r) | ({"price": usd} if prices else {}) for r, usd in priced]
    notes = dict.fromkeys(note for r in reports for note in r.notes)  # each once
    facts = {**facts, "unusual": [*facts["unusual"], *notes], "assumes": assumes(reports)}
    if as_json:
        typer.echo(json.dumps({**facts, "plans": plain}))
    else:
        lines = model_lines(facts["script"]) if "script" in facts else []
        say("\n".join([*lines, search_line(facts)]), facts)
        print_tables(plans_table(facts, reports, bills))
    if facts.get("stopped"):
        raise typer.Abort("the plans are the best so far")
    log_last(log_plans, facts, plain)


def search_line(facts: Facts) -> str:
    """What all plans of a search do in a step, in one line."""
    samples, gpus = facts["global_batch"], facts["gpus"]
    tokens = f" x {facts['seq']:,} tokens" if facts["seq"] else ""
    per_gpu = f"{samples / gpus:.4g} a GPU"
    return f"train: {samples:,} samples{tokens} over all GPUs, {per_gpu}; {settings(facts)}"


def run_search(
    search: Search, facts: Facts, page: Path | None = None
) -> tuple[Row, list[Forecast]]:
    """Run the search that ``facts`` describe with a progress bar; ValueError if no plan is legal.

    Returns how many plans it considered and simulated, and forecasts of the best ones, to which the
    simplest plan that may be as good is added.
    """
    from itercast.compose.plan_search.search import best_plans
    from itercast.eval.progress import progress_bar

    gpus, objective = facts["gpus"], facts["objective"]
    with progress_bar() as bar:
        task = bar.add_task("plans", total=None)
        search.tell = lambda doing: bar.update(task, description=doing)
        result = best_plans(
            search,
            gpus,
            objective,
            on_plan=lambda n, best: bar.update(
                task, description=f"{counted(n, 'plan')}, best {best}"
            ),
        )
    if result.stopped and not result.best:
        raise typer.Abort
    if not result.best:
        raise ValueError(f"no legal plan of {facts['case']} for {gpus} GPUs: {search.why_none()}")
    shown = list(result.best)
    if result.simplest and result.simplest.plan not in [s.plan for s in shown]:
        shown.append(result.simplest)
    reports = [search.report(s.plan, facts["bundle"]) for s in shown]
    counts: Row = {"considered": result.considered, "simulated": result.simulated}
    counts |= {"stopped": True} if result.stopped else {}
    counts |= {"simplest": str(result.simplest.plan) if result.simplest else ""}
    if page is not None:
        function_of("pages", "plan")(page, search, result, facts, reports)
        typer.echo(f"page of the search: {page}", err=True)
    return counts, reports


def plans_table(
    facts: Row, reports: Sequence[Forecast], prices: Sequence[Mapping[str, float]]
) -> Table:
    """A table of plans, the best first, each with a bar of where the slowest rank's time goes.

    ``prices``: of each plan, in USD by unit (``usd_per_...``), empty where no prices are known. The
    last unit is shown: a number of samples or tokens.
    """
    from itercast.commands.shared import cluster_line, memory_cell

    title = f"{facts['case']} on {facts['gpus']} x {facts['gpu']}, by {facts['objective']}"
    units = list(prices[0])[-1:]
    usd_per = ("USD per " + unit.split("_", 2)[2].replace("_", " ") for unit in units)
    heads, look = ("plan", "ms", "GB", "MFU %", "time", *usd_per), {"box": box.SIMPLE_HEAD}
    table = headed(title, *heads, texts=("plan", "time"), padding=(0, 1, 0, 0), **look)
    for r, usd in zip(reports, prices, strict=True):
        plan = r.plan.partition(",node=")[0]
        if r.cluster and "rows" in r.cluster["groups"][0]:
            plan += f": {cluster_line(r.cluster)}"
        table.add_row(
            plan + (" *" if r.plan == facts.get("simplest") else ""),
            f"{r.iteration_us / 1e3:.1f}",
            memory_cell(r),
            f"{100 * r.mfu_frac:.1f}",
            waterfall(r),
            *(three_digits(usd[unit]) for unit in units),
        )
    table.caption = _caption(facts, reports)
    return table


def _caption(facts: Row, reports: Sequence[Forecast]) -> Text:
    """What stands below a table of plans: the marks in it, and how many plans were tried."""
    from itercast.commands.shared import lengths_line, memory_cell, memory_legend, surely_fits

    legend = Text(", ").join(Text(mark, color) + f" {name}" for name, mark, color in PARTS)
    lines = []
    if facts.get("simplest"):
        lines.append("*: the simplest plan that may be as good as the best")
    tried = f"{facts['considered']} plans considered, {facts['simulated']} simulated"
    lines += [f"{tried} in {facts['seconds']:.1f} s", *memory_legend(reports)]
    if "?" in memory_cell(reports[0]):
        lines.append(surely_fits(reports))
    if reports[0].lengths:
        lines.append(f"the best: {lengths_line(reports[0].lengths)}")
    return Text.assemble("slowest rank: ", legend, "\n", "\n".join(lines))


def waterfall(r: Forecast) -> Text:
    """A bar of up to ``BAR`` characters: the parts of the slowest rank's iteration, in order."""
    bar, drawn, total_us = Text(), 0, 0.0
    for (_, mark, color), part_us in zip(PARTS, r.lanes_us, strict=True):
        total_us += part_us
        end = round(BAR * min(1.0, total_us / r.iteration_us)) if r.iteration_us else 0
        bar.append(mark * (end - drawn), color)
        drawn = max(drawn, end)
    return bar
