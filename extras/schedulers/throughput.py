"""The command ``itercast throughput``: one model on many GPUs, as a table for schedulers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from itercast.capture.base.slow_imports import pd
from itercast.errors import leave_if_failed
from itercast.eval.tables import headed, print_tables, three_digits
from itercast.options import Json, Prices, Question, asks, prints_aside
from itercast.outputs import folder_to_write
from itercast.stated import assumes, options, say, settings, stated

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.extras.schedulers.table import Cell
    from itercast.microbench.store import Row


@asks
def throughput(
    question: Question,
    gpu: Annotated[str, typer.Option(help="GPU names or YAML files, separated by commas")],
    gpus: Annotated[str, typer.Option(help="numbers of GPUs, e.g. 1,2,4,8")],
    batch: Annotated[str, typer.Option(help="samples of a replica, e.g. 8,16")] = "",
    plan: Annotated[str, typer.Option(help='plan without dp, e.g. "tp=2,zero=1"')] = "",
    node: Annotated[
        str, typer.Option(help="nodes, separated by commas, each for the GPU that it holds")
    ] = "",
    prices: Prices = None,
    out: Annotated[
        Path | None, folder_to_write("folder to write: throughput.csv, gavel.json and sia/")
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast a model on several GPUs, numbers of them and batches: a scheduler's table.

    Its exit code is 1 where some of them cannot be forecast, 2 where none.
    """
    names, counts = words("gpu", gpu), whole_numbers("gpus", gpus)
    batches = whole_numbers("batch", batch) if batch else [None]
    from itercast.eval.progress import progress_bar
    from itercast.extras.schedulers.table import throughput_table

    if question.global_batch:
        raise ValueError("--global-batch: the GPUs vary here, give --batch, that of a replica")
    asked = question.arguments()
    for mine in ("gpu", "batch", "plan"):
        del asked[mine]
    asked |= {"pattern": plan, "nodes": words("node", node) if node else [], "prices": prices}
    with progress_bar() as bar, prints_aside():
        task = bar.add_task("cells", total=None)
        asked["on_cell"] = lambda c: bar.update(task, description=f"{c.gpus} x {c.gpu}")
        cells = throughput_table(question.asked(), names, counts, batches, **asked)
    if out is not None:
        _write(out, question.name, cells)
    rows = [{"case": question.name, **cell.row()} for cell in cells]
    known = {**_shared_options(question, plan, names), "gpu": gpu, "gpus": gpus, "batch": batch}
    known |= {"node": node, "prices": prices}
    told = {"assumes": assumes([c.forecast for c in cells if c.forecast]), "unusual": []}
    if as_json:
        known["dtype"] = known["dtype"] if " or " not in known["dtype"] else question.dtype
        facts = {**stated(known, "throughput"), **told}
        typer.echo(json.dumps({"case": question.name, **facts, "cells": rows}))
    else:
        tokens = f" of {known['seq']:,} tokens" if known["seq"] else ""
        step = f"{question.mode}: samples{tokens}, batch is a replica's; {settings(known)}"
        say(step, told)
        print_tables(_table(question.name, cells))
    leave_if_failed(sum(cell.forecast is None for cell in cells), len(cells))


def _shared_options(question: Question, plan: str, names: Sequence[str]) -> Row:
    """The options that all cells share, as a forecast prints them.

    ``dtype`` is "fp16 or bf16" where the GPUs differ under amp.
    """
    from itercast.compose.target import find_target, step_dtype

    gpus = [find_target(name, "", question.bundle).gpu for name in names if name != "cpu"]
    amp = "amp" in plan.split(",")
    dtypes = {step_dtype(question.dtype, amp, [gpu]) or "fp32" for gpu in gpus} or {"fp32"}
    shared = {**options(question), "plan": plan, "dtype": " or ".join(sorted(dtypes))}
    shared["optimizer"] = question.optimizer or question.case_defaults.optimizer
    return {**shared, "seq": question.seq_asked()}


def words(option: str, text: str) -> list[str]:
    """The parts of a text between commas, each once; ValueError for an empty one."""
    found = dict.fromkeys(part.strip() for part in text.split(","))
    if "" in found:
        raise ValueError(f"--{option} is a list separated by commas, none empty, got {text!r}")
    return list(found)


def whole_numbers(option: str, text: str) -> list[int]:
    """Positive integers separated by commas, each once; ValueError names the option."""
    parts = words(option, text)
    for part in parts:
        if not (part.isascii() and part.isdecimal() and 0 < int(part) < 10**8):
            rule = f"--{option} takes positive integers below 10^8 like 1,2,4"
            raise ValueError(f"{rule}, got {part!r}")
    return [int(part) for part in parts]


def _write(folder: Path, name: str, cells: Sequence[Cell]) -> None:
    """Write the table as CSV, and in the forms that Gavel and Sia read."""
    from itercast.capture.base.files import write_atomic
    from itercast.extras.schedulers.table import gavel_table, sia_rows

    files = {folder / "throughput.csv": [{"case": name, **cell.row()} for cell in cells]}
    for gpu, file, row in sia_rows(cells):
        files.setdefault(folder / "sia" / gpu / name / file, []).append(row)
    for path, rows in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, pd.DataFrame(rows, dtype=object).to_csv(index=False).encode())
    table = json.dumps(gavel_table(name, cells), indent=1)
    write_atomic(folder / "gavel.json", table.encode())


def _table(name: str, cells: Sequence[Cell]) -> Table:
    from itercast.commands.shared import memory_cell, memory_legend

    title, texts = f"{name}: forecast throughput", ("GPUs", "plan")
    heads = (*texts, "batch", "ms", "samples/s", "GB", "J/sample", "USD/1M")
    table = headed(title, *heads, texts=texts, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    notes = ["energy: all GPUs at their power limit; USD: of a million samples"]
    for cell in cells:
        place = (f"{cell.gpus} x {cell.gpu}", cell.plan, str(cell.batch or ""))
        if (found := cell.forecast) is None:
            table.add_row(*place, *["-"] * 5)
            notes.append(cell.reason)
            continue
        joule, usd = cell.row()["energy_j_per_sample"], cell.usd_per_sample
        table.add_row(
            *place,
            f"{found.iteration_us / 1e3:.1f}",
            three_digits(found.samples_per_s),
            memory_cell(found),
            "-" if joule is None else three_digits(joule),
            "-" if usd is None else three_digits(1e6 * usd),
        )
    notes += memory_legend([cell.forecast for cell in cells if cell.forecast])
    table.caption = "\n".join(dict.fromkeys(notes))
    return table
