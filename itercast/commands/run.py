"""``itercast run``: forecasts an unchanged training script on GPUs that are not there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from itercast.capture.base.slow_imports import without_scikit_learn
from itercast.options import (
    Anchor,
    Bundle,
    GpuName,
    Host,
    Json,
    Machine,
    NodeName,
    Question,
    Stack,
    Trace,
)

if TYPE_CHECKING:
    from itercast.capture.input.lane import InputLane
    from itercast.capture.programs.program import ProgramCapture
    from itercast.compose.forecast import Forecast
    from itercast.compose.target import Target


def run(
    script: Annotated[Path, typer.Argument(help="a training script as torchrun takes it")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    gpu: GpuName = "cpu",
    gpus: Annotated[int, typer.Option(min=1, help="number of GPUs, one process each")] = 1,
    node: NodeName = "",
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
    the script, its own arguments after it.
    """
    with without_scikit_learn():
        from itercast.anchors import known_machine
        from itercast.compose.programs.forecast import forecast_program, trace_of_program
        from itercast.compose.programs.scripts import captured_script
        from itercast.compose.target import find_target

    plan, known = f"node={node}" if node else "", known_machine(machine, anchor, Question)
    target = find_target(gpu, plan, bundle, host, stack, known, script.name)
    with Console(stderr=True).status(f"running {script.name} as rank 0 of {gpus}"):
        captured = captured_script(script, arguments or [], target, gpus, steps, limit, no_cache)
    program, lane = captured.program, captured.lane
    found, loading_us, advice = forecast_program(program, target), 0.0, ""
    step_us = found.iteration_us
    if lane is not None:
        from itercast.compose.input_pipeline import with_input

        made = lane.worker if lane.workers else lane.alone
        loading_us = made.mean_us * program.samples / lane.batch_samples
        advice = _workers(found, lane, target, program.samples)
        found = with_input(found, lane, target, program.samples)
    if trace is not None:
        from itercast.commands.shared import write_trace

        write_trace(trace, trace_of_program(program, target))
    if as_json:
        facts = {"step_us": step_us, "loading_us": loading_us, "notes": program.notes}
        facts |= {"optimizer_steps": program.optimizer_steps, "from_cache": captured.kept}
        typer.echo(json.dumps({"case": script.name, **asdict(found), **facts}))
    else:
        kept = ("read from the cache; --no-cache captures it anew",) * captured.kept
        program = replace(program, notes=(*program.notes, *kept))
        _print(script.name, found, step_us, loading_us, advice, program)


def _workers(found: Forecast, lane: InputLane, target: Target, samples: int) -> str:
    """How many workers a loader has, and how many hide it from the step."""
    from itercast.compose.input_pipeline import consumer, cores_of_a_rank, fewest_workers

    own = f"{lane.workers} workers"
    if not lane.workers:
        return own
    cores = cores_of_a_rank(lane, target, found.world_size)
    best = fewest_workers(lane, consumer(found, lane, target, samples), cores)
    if best.input_bound:
        return f"{own}; more do not hide it: it is limited by {best.stage}"
    return f"{own}; {best.workers} hide it, on {cores:.0f} cores"


def _print(
    name: str,
    found: Forecast,
    step_us: float,
    loading_us: float,
    advice: str,
    program: ProgramCapture,
) -> None:
    """Print a forecast as a table: the step alone, the batches it takes, and notes beside it."""
    from itercast.commands.shared import forecast_table

    table = forecast_table(name, found)
    if loading_us:
        waits_us = found.idle_by_us["input"]
        limit = "its input as measured here" if waits_us > 0 else "its step"
        table.title = f"{table.title}, limited by {limit}"
        table.add_row("its step alone", f"{step_us * 1e-3:.2f} ms")
        table.add_row("its batches, in one process here", f"{loading_us * 1e-3:.2f} ms")
        table.add_row("waits for its batches", f"{waits_us * 1e-3:.2f} ms of the iteration")
        table.add_row("its DataLoader has", advice)
    if program.optimizer_steps > 1:
        each_ms = found.iteration_us / program.optimizer_steps * 1e-3
        table.add_row("its optimizer steps", f"{program.optimizer_steps}, {each_ms:.2f} ms each")
    for note in program.notes:
        table.add_row("note", note)
    Console().print(table)
