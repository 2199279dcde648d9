"""``itercast run``: forecasts an unchanged training script on GPUs that are not there."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from itercast.capture.base.extensions import function_of
from itercast.capture.base.garbage import without_garbage_collection
from itercast.commands.predict import Explain
from itercast.commands.script_case import AsModule, print_under_plan
from itercast.errors import leave_if_failed
from itercast.eval.tables import headed, print_tables, sized
from itercast.microbench.hardware.spec import gpu_names
from itercast.options import (
    Anchor,
    Bundle,
    Host,
    Json,
    Machine,
    NodeName,
    Question,
    Stack,
    Trace,
    whole_number,
    without_units,
)
from itercast.script_orders import script_order, telling
from itercast.stated import (
    assumes,
    command,
    machine_lines,
    say,
    script_line,
    unusual_dtype,
)

MOST_TIMES = 100  # no assumption: of a batch that fits, beyond which the number says nothing

if TYPE_CHECKING:
    from itercast.compose.forecast import Forecast
    from itercast.compose.programs.scripts import CapturedScript, ScriptOrder
    from itercast.microbench.store import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptForecast:
    """The forecast of a script on some GPUs: one row of the answer."""

    forecast: Forecast  # with waits for its DataLoader, where it has one
    step_us: float  # without them
    loading_us: float  # to load a step's samples in one process; 0 without a DataLoader
    advice: str  # how many workers of the DataLoader hide it
    captured: CapturedScript
    order: ScriptOrder
    training: Row  # times of an epoch and of all, as far as they are known


Pairs = Sequence[tuple[str, int]]  # GPU and number of them, of each row
Rows = Sequence[ScriptForecast | str]  # of one that could not be forecast, the reason


@without_garbage_collection()
def run(
    script: Annotated[Path, typer.Argument(help="a training script as torchrun takes it")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    gpu: Annotated[str, typer.Option(help="GPU, or several: a,b")] = "cpu",
    gpus: Annotated[str, typer.Option(help="number of GPUs, or several: 8,16")] = "1",
    node: NodeName = "",
    plan: Annotated[
        str, typer.Option(help='forecast its model under this plan instead, as "dp=8,tp=8,amp"')
    ] = "",
    module: AsModule = False,
    steps: Annotated[int, typer.Option(min=2, help="steps to run; the last is forecast")] = 3,
    limit: Annotated[int, typer.Option(min=1, help="seconds that the script may take")] = 600,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="capture it anew")] = False,
    bundle: Bundle = None,
    host: Host = "",
    stack: Stack = "",
    machine: Machine = None,
    anchor: Anchor = None,
    trace: Trace = None,
    explain_assumptions: Explain = False,
    as_json: Json = False,
) -> None:
    """Forecast a step of an unchanged training script on GPUs that need not exist.

    The script runs as rank 0 of all ranks, on tensors without data. Options of itercast come before
    the script, its own arguments after it. Several GPUs or numbers of them make a table; its exit
    code is 1 where some of them cannot be forecast, 2 where none.
    """
    from itercast.anchors import known_machine

    arguments = arguments or []
    arguments = arguments[arguments[:1] == ["--"] :]  # before which `plan` has its own options
    if gpu == "cpu":
        _refuse_gpus_behind([*["--module"] * module, str(script)], arguments)
    pairs = list(product(gpu.split(","), _counts(gpus)))
    if (trace is not None or plan) and len(pairs) > 1:
        raise ValueError(f"{'plan' if plan else 'trace'}: of one GPU and one number of GPUs")
    named: Row = {"bundle": bundle, "host": host, "stack": stack, "module": module, "node": node}
    named |= {"machine": known_machine(machine, anchor, Question)}
    orders: list[ScriptOrder] = []
    for name, count in pairs:
        order = script_order(str(script), arguments, gpu=name, gpus=count, **named)
        orders.append(replace(order, steps=steps, limit_s=limit, anew=no_cache))
    script = orders[0].path
    misplaced = [x for x in arguments if x.partition("=")[0] in ("--gpu", "--gpus")]
    names = ", ".join(misplaced)
    hint = f"{names} is passed on to {script.name}: options of itercast come before it"

    if plan:
        forecasts = [print_under_plan(orders[0], plan, trace, as_json)]
    else:
        rows = _forecasts(orders, trace)
        if len(pairs) == 1 and isinstance(rows[0], str):
            raise ValueError(f"{rows[0]}; {hint}" if misplaced else rows[0])
        if misplaced:
            typer.echo(f"note: {hint}", err=True)
        _say(script.name, pairs, rows, as_json)
        forecasts = [row.forecast for row in rows if not isinstance(row, str)]
    for forecast in forecasts if explain_assumptions and not as_json else ():
        function_of("assumed_parts", "print")(forecast)
    leave_if_failed(len(pairs) - len(forecasts), len(pairs))


def _refuse_gpus_behind(script: Sequence[str], words: Sequence[str]) -> None:
    """ValueError if ``--gpu`` of itercast was given after the script, which would get it."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--gpu", "--gpus"):
        parser.add_argument(name, nargs="?", default="")
    found, own = parser.parse_known_args(list(words))
    if found.gpu and {*found.gpu.split(",")} <= {*gpu_names()}:
        options = ["--gpu", found.gpu, *(["--gpus", found.gpus] if found.gpus else [])]
        right = shlex.join(["itercast", "run", *options, *script, *own])
        raise ValueError(f"{shlex.join(options)} would be passed on to the script; give: {right}")


def _say(name: str, pairs: Pairs, rows: Rows, as_json: bool) -> None:
    """Print the forecast of a script, or a table of several."""
    if as_json:
        plain = [row if isinstance(row, str) else _facts(name, row) for row in rows]
        typer.echo(json.dumps(plain if len(pairs) > 1 else plain[0]))
        return
    if forecasts := [row for row in rows if not isinstance(row, str)]:
        facts = _described(name, forecasts)
        say(facts["forecast_of"], facts)
    if len(pairs) > 1:
        print_tables(_compared(name, pairs, rows))
    else:
        _print(name, forecasts[0])


def _counts(text: str) -> list[int]:
    """Numbers of GPUs among commas; ValueError for others."""
    try:
        return [whole_number(word) for word in text.split(",")]
    except typer.BadParameter as exc:
        raise ValueError(f"gpus {text!r}: {exc}; several are as 8,16") from None


def _forecasts(orders: Sequence[ScriptOrder], trace: Path | None) -> list[ScriptForecast | str]:
    """Forecast each order's script from its capture, new or kept; a text says why one failed."""
    from itercast.compose.programs.several import captured_scripts

    rows = list[ScriptForecast | str]()
    with telling(*orders) as orders_with_progress:
        captures = captured_scripts(orders_with_progress)
    for order, captured in zip(orders, captures, strict=True):
        try:
            if isinstance(captured, ValueError):
                raise captured
            rows.append(_forecast(order, captured, trace))
        except ValueError as exc:
            rows.append(str(exc))
    return rows


def _forecast(order: ScriptOrder, captured: CapturedScript, trace: Path | None) -> ScriptForecast:
    """Forecast a captured script, with waits for its DataLoader where one was measured."""
    from itercast.compose.programs.forecast import forecast_program
    from itercast.compose.programs.scripts import CapturedScript

    target = order.target
    program, lane = captured.program, captured.lane
    forecast, loading_us, advice = forecast_program(program, target), 0.0, ""
    step_us = forecast.iteration_us
    if lane is not None:
        batch_time = lane.worker if lane.workers else lane.alone
        loading_us = batch_time.mean_us * program.samples / lane.batch_samples
        fed = (forecast, lane, target, program.samples)
        advice = function_of("inputs", "advice")(*fed)
        forecast = function_of("inputs", "with_input")(*fed)
    evaluated = program.training.evaluations if program.training else ()
    scripts = (CapturedScript(program=x.program, lane=x.lane, kept=True) for x in evaluated)
    batches = [(_forecast(order, script, None).forecast, script.lane) for script in scripts]
    between = program.training, forecast, lane, batches
    if trace is not None:
        from itercast.commands.shared import write_trace

        write_trace(trace, "program", program, target)
    return ScriptForecast(
        forecast=forecast,
        step_us=step_us,
        loading_us=loading_us,
        advice=advice,
        captured=captured,
        order=order,
        training=function_of("inputs", "training_facts")(*between),
    )


def _facts(name: str, row: ScriptForecast) -> dict[str, Any]:
    """A forecast as plain values; rates are null if the samples of a step are unknown."""
    from itercast.compose.programs.price import sent_bytes
    from itercast.compose.time_parts import limits

    program = row.captured.program
    facts = {"step_us": row.step_us, "loading_us": row.loading_us, "notes": _notes(row)}
    facts["limits_frac"], facts["batches_that_fit"] = limits(row.forecast), _batches_that_fit(row)
    facts |= {"sent_bytes": sent_bytes(program), **_question(row), **_described(name, [row])}
    facts |= {"optimizer_steps": program.optimizer_steps, "passes": program.passes}
    facts |= {"from_cache": row.captured.kept}
    facts |= {
        rate: getattr(row.forecast, rate) or None for rate in ("samples_per_s", "tokens_per_s")
    }
    return {"case": name, **asdict(row.forecast), **row.training, **facts}


def _described(name: str, rows: Sequence[ScriptForecast]) -> Row:
    """Lines for the user: what was forecast, what is unusual about it, and what is assumed.

    ``rows``: the same script on several GPUs.
    """
    from itercast.compose.programs.price import product_dtypes
    from itercast.compose.programs.samples import batch_of
    from itercast.compose.programs.script_model import engine_of

    program, gpu = rows[0].captured.program, rows[0].order.target.gpu
    products = product_dtypes(program, gpu)
    engine = engine_of(program.ranks[min(program.ranks)].calls)
    worlds = list(dict.fromkeys(row.forecast.world_size for row in rows))
    line = script_line(name, batch_of(program), worlds, products, engine)
    gpus = {row.order.target.gpu.name: row.order.target.gpu for row in rows}
    unusual = [text for other in gpus.values() for text in without_units(products, other)]
    if products[:1] == ["fp32"]:
        unusual += filter(None, [unusual_dtype({"dtype": "fp32"}, gpu)])
    disks = dict.fromkeys(row.training["assumes"] for row in rows if "assumes" in row.training)
    assumed = "; ".join([assumes([row.forecast for row in rows]), *disks])
    facts = {"unusual": unusual, "assumes": assumed}
    if lines := machine_lines(rows[0].order.target):
        facts["machine"] = [*lines, *_advised(rows)]
    return {"forecast_of": line, **facts}


def _advised(rows: Sequence[ScriptForecast]) -> list[str]:
    """Which of several numbers of GPUs to measure next, so that the most are forecast best."""
    from itercast.compose.programs.measured_script import untimed

    *others, most = sorted(rows, key=lambda row: row.forecast.world_size)
    if not others:
        return []
    steps = [untimed(row.order, row.captured.program) for row in (most, *others)]
    return [line] if (line := function_of("anchors", "next_run")(steps[0], steps[1:])) else []


def _question(row: ScriptForecast) -> Row:
    """``question``: all options, with defaults of those not given; ``command``: a line with them.

    ``batch``: samples that a rank loads in a step, or rows that its model is given.
    """
    order, forecast = row.order, row.forecast
    options: Row = {"gpu": forecast.gpu, "gpus": forecast.world_size}
    options |= {"node": order.target.plan.node, "bundle": forecast.bundle}
    options |= {"host": forecast.host, "stack": forecast.stack}
    options |= {"steps": order.steps, "limit": order.limit_s}
    stated = {name: value for name, value in options.items() if value}
    script = ["--module", order.module] if order.module else [str(order.path)]
    question = {"script": script[-1], "arguments": list(order.arguments), **stated}
    question |= {"batch": row.captured.program.samples or row.captured.program.rows_given}
    words = shlex.join([*script, *order.arguments])
    return {"question": question, "command": f"{command('run', stated)} {words}"}


def _compared(name: str, pairs: Pairs, rows: Rows) -> Table:
    """A table with a row per GPU and number of GPUs; notes and failures stand below it."""
    from itercast.commands.shared import memory_cell, memory_legend
    from itercast.compose.time_parts import limits

    heads = ("GPUs", "step ms", "with input", "samples/s", "tokens/s", "MFU %", "GB", "bound by")
    table = headed(name, "GPU", *heads, texts=("GPU", "bound by"))
    notes, failed = dict[str, None](), dict[str, list[str]]()
    for (gpu, count), row in zip(pairs, rows, strict=True):
        if isinstance(row, str):
            table.add_row(gpu, str(count), *["-"] * (len(heads) - 1))
            failed.setdefault(row, []).append(f"{count} x {gpu}")
            continue
        forecast, bounds = row.forecast, list(limits(row.forecast).items())[:2]
        notes.update(dict.fromkeys(_notes(row)))
        table.add_row(
            gpu,
            str(count),
            f"{row.step_us * 1e-3:.2f}",
            f"{forecast.iteration_us * 1e-3:.2f}",
            f"{forecast.samples_per_s:.1f}" if forecast.samples_per_s else "-",
            f"{forecast.tokens_per_s:,.0f}" if forecast.tokens_per_s else "-",
            f"{100 * forecast.mfu_frac:.1f}",
            memory_cell(forecast),
            ", ".join(f"{what} {100 * share:.0f} %" for what, share in bounds),
        )
    legend = memory_legend([row.forecast for row in rows if not isinstance(row, str)])
    reasons = [f"{', '.join(where)}: {reason}" for reason, where in failed.items()]
    table.caption = "\n".join([*reasons, *notes, *legend]) or None
    return table


def _notes(row: ScriptForecast) -> list[str]:
    """What to know of how a step was captured and forecast, a sentence each."""
    return [*row.forecast.notes, *row.captured.program.notes]


def _batches_that_fit(row: ScriptForecast) -> float:
    """A lower bound of how many times a rank's batch fits into its GPU's memory.

    (room - held) / (peak - held), in bytes: what is not held all through a step is taken to grow
    with the batch. Activations do; gradients do not, so more may fit.
    """
    forecast, held_bytes = row.forecast, row.captured.program.held_bytes
    room_bytes = max(0, forecast.memory_room_bytes - held_bytes)
    return room_bytes / max(1, forecast.memory_bytes - held_bytes)


def _fits(row: ScriptForecast) -> str:
    """How many times a rank's batch would fit, in words."""
    times = _batches_that_fit(row)
    if not times:
        return "too much even without a batch"
    if times > MOST_TIMES:
        return f"over {MOST_TIMES} times its batch would fit"
    return f"at least {times:,.{1 if times >= 1 else 2}f} times its batch would fit"


def _print(name: str, row: ScriptForecast) -> None:
    """Print a script's forecast as a table, with its memory, messages, DataLoader and notes."""
    from itercast.commands.shared import add_parts, forecast_table
    from itercast.compose.programs.price import messages, sent_bytes

    forecast, program = row.forecast, row.captured.program
    ungrouped = forecast.world_size > 1 and not program.grouped  # makes no process group
    table = forecast_table(name, forecast, of=" of one process" * ungrouped, batches=_fits(row))
    if sent := sent_bytes(program):
        text = ", ".join(f"{kind} of {sized(nbytes)}" for kind, nbytes in sent.items())
        sizes = sorted({len(call.kwargs["ranks"]) for call in messages(program)})
        among = " or ".join(map(str, sizes))
        table.add_row("messages of a rank", f"{text}, among {among} ranks")
    if row.loading_us:
        if row.step_us < forecast.iteration_us - 5:  # in hundredths of a ms another number
            table.add_row("without waits for batches", f"{row.step_us * 1e-3:,.2f} ms")
        loading = f"{row.loading_us * 1e-3:,.2f} ms a step, by one process on this machine"
        table.add_row("loading its batches", loading)
        table.add_row("DataLoader", row.advice)
    for fact in function_of("inputs", "training_rows")(row.training):
        table.add_row(*fact)
    if program.passes:
        table.add_row("passes of a step", ", ".join(program.passes))
    if program.optimizer_steps > 1:
        each_ms = forecast.iteration_us / program.optimizer_steps * 1e-3
        table.add_row("optimizer steps", f"{program.optimizer_steps}, {each_ms:.2f} ms each")
    cached = ["read from the cache; --no-cache captures it anew"] * row.captured.kept
    for note in (*program.notes, *cached):
        table.add_row("note", note)
    add_parts(table, forecast)
    print_tables(table)
