"""`itercast explain`: where an iteration's time goes, and which change would gain most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.plan import ParallelPlan
from itercast.commands.script_case import AsModule, model_lines, searched
from itercast.eval.tables import headed, output, print_tables
from itercast.options import Json, Question, asks, prints_aside
from itercast.stated import assumes, question_facts, say, say_step

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.compose.capture_model import SizedModel
    from itercast.compose.forecast import Forecast
    from itercast.compose.time_parts import TimePart
    from itercast.extras.explain.changes import Change
    from itercast.extras.explain.hot_ops import HotOp
    from itercast.microbench.store import Row

SCRIPTED = ("software", "plan", "batch")  # kinds of changes that a user of the same GPU can make
BAR = 20  # characters of the longest bar
OPS = 10  # listed


@asks
@without_garbage_collection()
def explain(
    question: Question,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="of a script in place of CASE; after -- all are")
    ] = None,
    module: AsModule = False,
    as_json: Json = False,
) -> None:
    """Show where an iteration's time goes and which change (software, plan, GPU) gains most.

    CASE may be a training script, as of `itercast plan`.
    """
    asked = (question, question.gpu, "", arguments or [])
    with searched(*asked, module=module) as (model, script):
        _explain(question, model, script, as_json)


def _explain(question: Question, model: Any, script: Row, as_json: bool) -> None:
    """Print the parts of a model's iteration, its longest ops, and what changes would gain."""
    asked = question.arguments()
    if script:
        from itercast.compose.predict import prepare  # imports what is slow

        asked |= _of_script(model, asked)
        step, target = prepare(model, **asked)
    else:
        step, target = question.prepared()
    from itercast.compose.target import forecast_step
    from itercast.compose.time_parts import time_parts
    from itercast.eval.progress import progress_bar
    from itercast.extras.explain.changes import changes
    from itercast.extras.explain.hot_ops import hot_ops
    from itercast.extras.explain.largest_batch import largest_batch

    found = forecast_step(step, target)
    own = {**script, "assumes": assumes([found])}
    facts = own if script else question_facts(question, step, target, found)
    parts, ops = time_parts(found), hot_ops(step, target, OPS)
    with progress_bar() as bar, prints_aside():
        task = bar.add_task("changes", total=None)
        gains = changes(model, asked, lambda name: bar.update(task, description=name))
        largest = largest_batch(model, asked, step, target)
    name = question.name
    title = f"{name} on {found.gpu}, plan {found.plan}: {found.iteration_us / 1e3:.2f} ms"
    if as_json:
        lists: dict[str, Sequence[Any]] = {"parts": parts, "ops": ops, "changes": gains}
        plain: Row = {key: [asdict(one) for one in some] for key, some in lists.items()}
        plain["largest_batch"] = largest
        typer.echo(json.dumps({"case": name, "forecast": asdict(found), **facts, **plain}))
        return
    if script:
        say("\n".join(model_lines(script["script"])), {"unusual": [], **facts})
    else:
        say_step(facts)
    listed = [one for one in gains if _percent(one) > 0 or (one.fits and not found.fits)]
    print_tables(_parts_table(title, parts), _ops_table(ops), _changes_table(listed))
    output().print(_left_out([one for one in gains if one not in listed]), highlight=False)
    output().print("\n".join(_advice(found, step.samples, largest, gains)))


def _of_script(model: SizedModel, asked: Row) -> Row:
    """Arguments of ``predict`` for a script's model: as asked, else as the script trains it."""
    plan = ParallelPlan.parse(asked["plan"])
    how = model.settings({**asked, "amp": plan.amp})
    plan = replace(plan, amp=how.pop("amp"))
    if not asked["plan"] and not asked["batch"]:
        plan = replace(plan, accumulate=model.facts.micro, recompute=model.facts.recompute)
    return {**how, "plan": str(plan)}


def _percent(one: Change) -> int:
    return round(100 * one.gain_frac)


def _left_out(others: Sequence[Change]) -> str:
    """The changes that were tried in vain: those that lose say how much."""
    names = (f"{one.name} {_percent(one)} %" if _percent(one) else one.name for one in others)
    return f"tried too, without gain: {', '.join(names) or 'none'}"


def _advice(found: Forecast, own: int, largest: int, gains: Sequence[Change]) -> list[str]:
    """Advice in lines: the largest micro-batch that fits, what bounds a step, what gains most."""
    from itercast.commands.shared import memory_cell, memory_legend
    from itercast.compose.time_parts import limits_in_words

    room = found.memory_room_bytes / 1e9
    fits = f"; micro-batches of up to {largest:,} samples fit, it has {own:,}" if largest else ""
    told = [f"memory: {memory_cell(found)} of {room:.1f} GB{fits}", *memory_legend([found])]
    told.append(f"bound by {limits_in_words(found)}")
    same = (one for one in gains if one.kind in SCRIPTED and one.fits and _percent(one) > 0)
    best = [f"{one.name} {_percent(one):+d} %" for one in same][:3]
    return [*told, *([f"gains most on this hardware: {', '.join(best)}"] if best else [])]


def _parts_table(title: str, parts: Sequence[TimePart]) -> Table:
    """A table of the iteration's parts with bars."""
    from itercast.compose.time_parts import NAMES

    table = headed(title, "part", "kind", "ms", "%", "", texts=("part", "kind", ""))
    longest = max((part.time_us for part in parts), default=1.0)
    for part in parts:
        bar = "█" * round(BAR * part.time_us / longest)
        share = f"{100 * part.iteration_frac:.1f}"
        name, ms = NAMES.get(part.name, part.name), f"{part.time_us / 1e3:,.2f}"
        table.add_row(name, part.kind, ms, share, bar)
    return table


def _ops_table(ops: Sequence[HotOp]) -> Table:
    """A table of the ops that take longest, and how near their roofline they are."""
    title = "ops of forward and backward that take longest, equal calls together"
    heads = ("op", "calls", "ms", "bound", "% of roofline", "shape")
    table = headed(title, *heads, texts=("op", "bound", "shape"))
    for op in ops:
        near = f"{100 * op.roofline_frac:.0f}"
        cells = (op.op, str(op.calls), f"{op.time_us / 1e3:.2f}", op.bound, near, op.shape)
        table.add_row(*cells)
    return table


def _changes_table(gains: Sequence[Change]) -> Table:
    """A table of changes that gain, most first."""
    heads = ("change", "kind", "ms", "samples/s %", "memory")
    title = "what a change would gain, each alone"
    table = headed(title, *heads, texts=("change", "kind", "memory"))
    for one in gains:
        fits = Text("fits") if one.fits else Text("too much", "red")
        gain = f"{_percent(one):+d}"
        table.add_row(one.name, one.kind, f"{one.iteration_us / 1e3:,.2f}", gain, fits)
    return table
