"""``itercast run``: forecasts an unchanged training script on GPUs that are not there."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from itercast.capture.base.extensions import function_of
from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture, launch_order
from itercast.commands.script_case import AsModule, print_under_plan, telling
from itercast.errors import leave_if_failed
from itercast.eval.tables import print_tables
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
from itercast.stated import assumes, of_dtype, say, script_line

MOST_TIMES = 100  # no assumption: of a batch that fits, beyond which the number says nothing

if TYPE_CHECKING:
    from itercast.capture.opcall import OpCall
    from itercast.compose.forecast import Forecast
    from itercast.compose.programs.scripts import CapturedScript, ScriptOrder
    from itercast.microbench.store import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasted:
    """A script's forecast, with its input where it has a DataLoader; ``step_us``: without it."""

    found: Forecast
    step_us: float
    loading_us: float
    advice: str
    captured: CapturedScript
    order: ScriptOrder


@without_garbage_collection()
def run(
    script: Annotated[Path, typer.Argument(help="a training script as torchrun takes it")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    gpu: Annotated[str, typer.Option(help="GPU, or several: a,b")] = "cpu",
    gpus: Annotated[str, typer.Option(help="number of GPUs, or several: 8,16")] = "1",
    node: NodeName = "",
    plan: Annotated[
        str, typer.Option(help='what if: the model that it trains under a plan, "dp=8,tp=8,amp"')
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
    as_json: Json = False,
) -> None:
    """Forecast a step of an unchanged training script on GPUs that need not exist.

    The script runs as rank 0 of all ranks, on tensors without data. Options of itercast come before
    the script, its own arguments after it. Several GPUs or numbers of them make a table; its exit
    code is 1 where some of them cannot be forecast, 2 where none.
    """
    from itercast.anchors import known_machine
    from itercast.compose.programs.scripts import ScriptOrder, module_file
    from itercast.compose.target import find_target

    name_of_module, script = (str(script), module_file(str(script))) if module else ("", script)
    behind = [x for x in arguments or [] if x.partition("=")[0] in ("--gpu", "--gpus")]
    hint = f"{', '.join(behind)} is passed on to {script.name}: options of itercast come before it"

    place, known = f"node={node}" if node else "", known_machine(machine, anchor, Question)
    pairs = list(product(gpu.split(","), _counts(gpus)))
    if (trace is not None or plan) and len(pairs) > 1:
        raise ValueError(f"{'plan' if plan else 'trace'}: of one GPU and one number of GPUs")
    asked: Row = {"path": script, "module": name_of_module, "arguments": arguments or []}
    asked |= {"steps": steps, "limit_s": limit, "anew": no_cache}
    orders = list[ScriptOrder]()
    for name, count in pairs:
        target = find_target(name, place, bundle, host, stack, known, script.name)
        orders.append(ScriptOrder(target=target, world_size=count, **asked))
    if plan:
        print_under_plan(orders[0], plan, trace, as_json)
        return
    rows = _forecasts(orders, trace)
    if len(pairs) == 1 and isinstance(rows[0], str):
        raise ValueError(f"{rows[0]}; {hint}" if behind else rows[0])
    if behind:
        typer.echo(f"note: {hint}", err=True)
    if as_json:
        plain = [r if isinstance(r, str) else _facts(script.name, r) for r in rows]
        typer.echo(json.dumps(plain if len(pairs) > 1 else plain[0]))
    else:
        _say(script.name, pairs, rows)
    leave_if_failed(sum(isinstance(row, str) for row in rows), len(rows))


def _say(name: str, pairs: Sequence[tuple[str, int]], rows: Sequence[Forecasted | str]) -> None:
    """Print the forecast of a script, or a table of several."""
    if found := [row for row in rows if not isinstance(row, str)]:
        facts = _told(name, found)
        say(facts["forecast_of"], facts)
    if len(pairs) > 1:
        print_tables(_compared(name, pairs, rows))
    else:
        _print(name, found[0])


def _counts(text: str) -> list[int]:
    """Numbers of GPUs among commas; ValueError for others."""
    try:
        return [whole_number(word) for word in text.split(",")]
    except typer.BadParameter as exc:
        raise ValueError(f"gpus {text!r}: {exc}; several are as 8,16") from None


def _forecasts(orders: Sequence[ScriptOrder], trace: Path | None) -> list[Forecasted | str]:
    """Capture a script for each order, or read its capture, and forecast it; or why not."""
    from itercast.compose.programs.several import captured_scripts

    rows = list[Forecasted | str]()
    with telling(*orders) as told:
        captures = captured_scripts(told)
    for order, captured in zip(orders, captures, strict=True):
        try:
            if isinstance(captured, ValueError):
                raise captured
            rows.append(_forecast(order, captured, trace))
        except ValueError as exc:
            rows.append(str(exc))
    return rows


def _forecast(order: ScriptOrder, captured: CapturedScript, trace: Path | None) -> Forecasted:
    """Forecast a captured script with its input."""
    from itercast.compose.programs.forecast import forecast_program

    target = order.target
    program, lane = captured.program, captured.lane
    found, loading_us, advice = forecast_program(program, target), 0.0, ""
    step_us = found.iteration_us
    if lane is not None:
        made = lane.worker if lane.workers else lane.alone
        loading_us = made.mean_us * program.samples / lane.batch_samples
        fed = (found, lane, target, program.samples)
        advice = function_of("inputs", "advice")(*fed)
        found = function_of("inputs", "with_input")(*fed)
    if trace is not None:
        from itercast.commands.shared import write_trace

        write_trace(trace, "program", program, target)
    return Forecasted(
        found=found,
        step_us=step_us,
        loading_us=loading_us,
        advice=advice,
        captured=captured,
        order=order,
    )


def _facts(name: str, one: Forecasted) -> dict[str, Any]:
    """A forecast as plain values; rates are null where the script does not say what it loads."""
    from itercast.compose.time_parts import limits

    program = one.captured.program
    facts = {"step_us": one.step_us, "loading_us": one.loading_us, "notes": _notes(one)}
    facts["limits_frac"], facts["batches_that_fit"] = limits(one.found), _batches_that_fit(one)
    facts |= {"sent_bytes": _sent(program), **_asked(one), **_told(name, [one])}
    facts |= {"optimizer_steps": program.optimizer_steps, "passes": program.passes}
    facts |= {"from_cache": one.captured.kept}
    facts |= {rate: getattr(one.found, rate) or None for rate in ("samples_per_s", "tokens_per_s")}
    return {"case": name, **asdict(one.found), **facts}


def _told(name: str, rows: Sequence[Forecasted]) -> Row:
    """What was forecast, what of it is unusual, and what is assumed, in words."""
    from itercast.compose.programs.price import product_dtypes
    from itercast.compose.programs.samples import batch_of
    from itercast.compose.programs.script_model import engine_of

    program, gpu = rows[0].captured.program, rows[0].order.target.gpu
    products = product_dtypes(program, gpu)
    engine = engine_of(program.ranks[min(program.ranks)].calls)
    worlds = list(dict.fromkeys(one.found.world_size for one in rows))
    line = script_line(name, batch_of(program), worlds, products, engine)
    wide = of_dtype({"dtype": "fp32"}, gpu) if products[:1] == ["fp32"] else ""
    gpus = {one.order.target.gpu.name: one.order.target.gpu for one in rows}
    unusual = [x for each in gpus.values() for x in without_units(products, each)]
    unusual += [wide] if wide else []
    facts = {"unusual": unusual, "assumes": assumes([one.found for one in rows])}
    return {"forecast_of": line, **facts}


def _asked(one: Forecasted) -> Row:
    """What was asked, with the values that stand in for options not given, as ``predict`` says it.

    ``batch``: samples that a rank loads in a step, where a DataLoader says so.
    """
    order, found = one.order, one.found
    options: Row = {"gpu": found.gpu, "gpus": found.world_size, "node": order.target.plan.node}
    options |= {"bundle": found.bundle, "host": found.host, "stack": found.stack}
    options |= {"steps": order.steps, "limit": order.limit_s}
    given = {name: value for name, value in options.items() if value}
    words = [w for name, value in given.items() for w in (f"--{name}", str(value))]
    script = ["--module", order.module] if order.module else [str(order.path)]
    question = {"script": script[-1], "arguments": list(order.arguments), **given}
    question |= {"batch": one.captured.program.samples}
    return {
        "question": question,
        "command": shlex.join(["itercast", "run", *words, *script, *order.arguments]),
    }


def _compared(
    name: str, pairs: Sequence[tuple[str, int]], rows: Sequence[Forecasted | str]
) -> Table:
    """A row for each GPU and number of them: a step, its rate, what it uses, and notes below."""
    from itercast.commands.shared import memory_cell, memory_legend

    table = Table(title=name)
    heads = ("GPUs", "step ms", "with input", "samples/s", "tokens/s", "MFU %", "GB", "of")
    table.add_column("GPU", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    notes, failed = dict[str, None](), dict[str, list[str]]()
    for (gpu, count), one in zip(pairs, rows, strict=True):
        if isinstance(one, str):
            table.add_row(gpu, str(count), *["-"] * (len(heads) - 1))
            failed.setdefault(one, []).append(f"{count} x {gpu}")
            continue
        found = one.found
        notes.update(dict.fromkeys(_notes(one)))
        table.add_row(
            gpu,
            str(count),
            f"{one.step_us * 1e-3:.2f}",
            f"{found.iteration_us * 1e-3:.2f}",
            f"{found.samples_per_s:.1f}" if found.samples_per_s else "-",
            f"{found.tokens_per_s:,.0f}" if found.tokens_per_s else "-",
            f"{100 * found.mfu_frac:.1f}",
            memory_cell(found),
            f"{found.memory_room_bytes / 1e9:.1f}",
        )
    legend = memory_legend([one.found for one in rows if not isinstance(one, str)])
    reasons = [f"{', '.join(where)}: {reason}" for reason, where in failed.items()]
    table.caption = "\n".join([*reasons, *notes, *legend]) or None
    return table


def _sent(program: ProgramCapture) -> dict[str, int]:
    """Bytes of the messages that the first captured rank takes part in during a step, by kind."""
    sent = Counter[str]()
    for call in _messages(program):
        sent[call.kwargs["kind"]] += call.kwargs["bytes"]
    return dict(sent.most_common())


def _messages(program: ProgramCapture) -> list[OpCall]:
    """The messages of the first captured rank in a step; none of groups of itself alone."""
    from itercast.compose.graph.compiled.repeats import without_repeats
    from itercast.compose.programs.price import uncompiled

    calls = without_repeats(program.ranks[min(program.ranks)], apart=uncompiled).calls
    launched = (calls[i] for i in launch_order(calls))
    return [c for c in launched if c.op == COLLECTIVE and len(c.kwargs["ranks"]) > 1]


def _notes(one: Forecasted) -> list[str]:
    """What to know of how a step was captured and forecast, a sentence each."""
    return [*one.found.notes, *one.captured.program.notes]


def _batches_that_fit(one: Forecasted) -> float:
    """How many times a rank's batch fits at least.

    Memory beyond the least of a step grows with the batch: activations do, gradients do not.
    """
    found, held = one.found, one.captured.program.held_bytes
    return max(0, found.memory_room_bytes - held) / max(1, found.memory_bytes - held)


def _fits(one: Forecasted) -> str:
    """Whether a rank's batch fits, and how many times it would, in words."""
    times, fits = _batches_that_fit(one), one.found.fits
    if not times:
        return "no; too much even without a batch"
    if times > MOST_TIMES:
        return f"yes; over {MOST_TIMES} times its batch would"
    told = f"{times:,.1f}" if fits else f"{times:.2g}"
    return f"{'yes' if fits else 'no'}; at least {told} times its batch would"


def _print(name: str, one: Forecasted) -> None:
    """Print a forecast as a table: the step alone, the batches it takes, and notes beside it."""
    from itercast.commands.shared import add_parts, forecast_table
    from itercast.compose.time_parts import IDLE_NAMES, limits

    found, program = one.found, one.captured.program
    alone = found.world_size > 1 and not program.grouped
    table = forecast_table(name, found, of=" of one process" * alone)
    table.add_row("fits", _fits(one))
    if sent := _sent(program):
        told = ", ".join(f"{kind} of {nbytes / 1e6:,.1f} MB" for kind, nbytes in sent.items())
        sizes = sorted({len(call.kwargs["ranks"]) for call in _messages(program)})
        among = " or ".join(map(str, sizes))
        table.add_row("messages of a rank", f"{told}, among {among} ranks")
    if one.loading_us:
        most = next(iter(limits(found)))
        limit = "its input as measured here" if most == IDLE_NAMES["input"] else "its step"
        table.title = f"{table.title}, limited by {limit}"
        table.add_row("its step alone", f"{one.step_us * 1e-3:.2f} ms")
        table.add_row("its batches, in one process here", f"{one.loading_us * 1e-3:.2f} ms")
        table.add_row("its DataLoader has", one.advice)
    if program.passes:
        table.add_row("its iteration is", ", ".join(program.passes))
    if program.optimizer_steps > 1:
        each_ms = found.iteration_us / program.optimizer_steps * 1e-3
        table.add_row("its optimizer steps", f"{program.optimizer_steps}, {each_ms:.2f} ms each")
    for note in program.notes:
        table.add_row("note", note)
    if one.captured.kept:
        table.add_row("note", "read from the cache; --no-cache captures it anew")
    add_parts(table, found)
    print_tables(table)
