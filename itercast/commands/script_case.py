"""A script as a case of the commands ``plan`` and ``run --plan``: the model that it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from itercast.capture.plan import ParallelPlan
from itercast.eval.tables import print_tables
from itercast.script_orders import script_order, telling
from itercast.stated import assumes, say

if TYPE_CHECKING:
    from itercast.capture.opcall import StepCapture
    from itercast.capture.programs.program import ProgramCapture
    from itercast.compose.capture_model import SizedModel
    from itercast.compose.forecast import Forecast
    from itercast.compose.programs.scripts import ScriptOrder
    from itercast.compose.target import Target
    from itercast.microbench.store import Row
    from itercast.options import Question


AsModule = Annotated[
    bool, typer.Option("-m", "--module", help="the script is a module's name, as of python -m")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCase:
    """The model that a script trains, and the captured program of the script's own step."""

    model: SizedModel
    program: ProgramCapture
    target: Target

    def prepared(self, plan: ParallelPlan, world: int) -> tuple[StepCapture, Target]:
        """The capture of a micro-batch under a plan, and the target with that plan.

        The ranks share the samples of ``world`` processes of the script, in micro-batches of the
        script's own size unless the plan states their number. Mixed precision is as in the script,
        and so is recomputation unless the plan states it.
        """
        from itercast.compose.capture_model import capture, micro_size
        from itercast.compose.target import find_node

        facts = self.model.facts
        settings = self.model.settings({"amp": plan.amp})
        samples = self.model.replica_batch * world
        if samples % plan.dp:
            raise ValueError(f"plan {str(plan)!r}: dp does not divide {samples} samples")
        microbatches = max(1, samples // plan.dp // facts.batch)
        if plan.pp > 1 and not plan.micro:
            plan = replace(plan, micro=microbatches)
        elif plan.pp == 1 and plan.accumulate == 1:
            plan = replace(plan, accumulate=microbatches)
        plan = replace(plan, amp=settings["amp"], recompute=plan.recompute or facts.recompute)
        size = micro_size(self.model, plan, samples // plan.dp, facts.seq)
        settings |= {"amp": plan.autocast}
        step = capture(self.model, **size, **settings)
        node = find_node(plan, self.target.gpu)
        return step, replace(self.target, plan=plan, node=node)

    def facts(self) -> Row:
        """Facts of the model, and two forecast times: how near the model's step is to the script's.

        ``script_us``: of the script, per optimizer step, on its GPUs; ``model_us``: of a step of
        the model alone, on one GPU.
        """
        from itercast.compose.programs.forecast import forecast_program
        from itercast.compose.programs.price import product_dtypes
        from itercast.compose.target import forecast_step

        program, facts = self.program, asdict(self.model.facts)
        program_us = forecast_program(program, self.target).iteration_us
        facts |= {"script_us": program_us / program.optimizer_steps}
        facts |= {"script_gpus": program.world_size, "updates": program.optimizer_steps}
        facts["notes"] = [*self.model.facts.notes, *program.notes]
        facts["products"] = product_dtypes(program, self.target.gpu)
        model_us = forecast_step(*self.prepared(ParallelPlan(), 1)).iteration_us
        return {**facts, "model_us": model_us, "engine": self.model.engine}


@contextmanager
def script_case(order: ScriptOrder) -> Iterator[ScriptCase]:
    """Run a script and find the model that it trains; the script's process ends with the context.

    The model lives there: it is captured under plans while the context is open.
    """
    from itercast.compose.programs.script_model import script_model

    with ExitStack() as stack:
        with telling(order) as (order_with_progress,):
            model, program = stack.enter_context(script_model(order_with_progress))
        yield ScriptCase(model=model, program=program, target=order.target)


def print_under_plan(order: ScriptOrder, text: str, trace: Path | None, as_json: bool) -> Forecast:
    """Print and return the forecast of the model that a script trains, under the plan ``text``.

    ValueError where the order asks for several GPUs and the plan has another number.
    """
    from itercast.commands.shared import add_parts, forecast_table, write_trace
    from itercast.compose.target import forecast_step

    plan = ParallelPlan.parse(text)
    if order.world_size not in (1, plan.world_size):
        raise ValueError(f"plan {text!r} is of {plan.world_size} GPUs, not of {order.world_size}")
    plan = replace(plan, node=order.target.plan.node or plan.node)
    order = replace(order, world_size=plan.world_size)
    with script_case(order) as case:
        step, target = case.prepared(plan, plan.world_size)
        forecast, facts = forecast_step(step, target), case.facts()
    if trace is not None:
        write_trace(trace, "step", step, target)
    if as_json:
        script = {"arguments": list(order.arguments), **facts}
        more = {"script": script, "assumes": assumes([forecast])}
        typer.echo(json.dumps({"case": order.path.name, **asdict(forecast), **more}))
        return forecast
    below = f"below: not the script, but its model under {forecast.plan}"
    say("\n".join([*model_lines(facts), below]), {"unusual": [], "assumes": assumes([forecast])})
    table = forecast_table(f"the model of {order.path.name}", forecast)
    add_parts(table, forecast)
    print_tables(table)
    return forecast


@contextmanager
def searched(
    question: Question,
    gpu: str,
    node: str,
    arguments: Sequence[str],
    *,
    gpus: int = 8,
    module: bool = False,
) -> Iterator[tuple[Any, Row]]:
    """The model whose plans are searched; for a script also facts of it, else none.

    ``arguments`` are the script's: options that the command does not know, and all after ``--``.

    The script's process runs until this context ends, as a single one or, if it needs several, as
    one of ``gpus``.
    """
    if not (module or question.case.endswith(".py")):
        if arguments:
            raise ValueError(f"arguments {list(arguments)} are of a script, not of {question.name}")
        yield question.asked(), {}
        return
    if question.lengths:
        raise ValueError("--lengths go without a script, whose batches are its own")
    named = {name: getattr(question, name) for name in ("bundle", "host", "stack")}
    where: Row = {"gpu": gpu, "gpus": gpus, "node": node, "machine": question.known_machine()}
    order = script_order(question.case, arguments, module=module, **where, **named)
    with script_case(order) as case:
        yield case.model, {"script": {"arguments": list(arguments), **case.facts()}}


def model_lines(facts: Row) -> list[str]:
    """Lines on ``ScriptCase.facts``: the model, and the times of the script's step and its own."""
    tokens = f" x {facts['seq']:,} tokens" if facts["seq"] else ""
    micro = f"{facts['micro']} micro-batches of " if facts["micro"] > 1 else ""
    dtype = f"{facts['dtype']} autocast" if facts["amp"] else facts["dtype"]
    size = f"{facts['parameters'] / 1e6:,.1f} M parameters"
    first = f"found {facts['model']}: {size}, {micro}{facts['batch']:,} samples{tokens} a process"
    whole_us, model_us, gpus = facts["script_us"], facts["model_us"], facts["script_gpus"]
    where, alone = ("one GPU", "") if gpus == 1 else (f"{gpus} GPUs", " on one GPU")
    updates = f" for each of {facts['updates']} updates" if facts["updates"] > 1 else ""
    second = f"the whole script on {where}{updates}: {whole_us * 1e-3:.2f} ms; "
    second += f"its model and loss alone{alone}, on which plans are based: {model_us * 1e-3:.2f} ms"
    if gpus == 1 and whole_us:
        second += f" ({100 * (model_us / whole_us - 1):+.1f} %)"
    notes = (f"note: {note}" for note in facts["notes"])
    also = ", layers recomputed" if facts["recompute"] else ""
    return [f"{first}, {dtype}, {facts['optimizer']}{also}", second, *notes]
