"""`itercast predict`: its own options and its output."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from itercast.capture.base.extensions import function_of
from itercast.capture.base.garbage import without_garbage_collection
from itercast.eval.tables import print_tables, three_digits
from itercast.options import Cluster, Json, Prices, Question, Trace, asks, prints_aside
from itercast.outputs import file_to_write
from itercast.stated import assumes, machine_lines, question_facts, say_step

if TYPE_CHECKING:  # no command but predict pays for these
    from itercast.capture.opcall import StepCapture
    from itercast.compose.forecast import Forecast
    from itercast.compose.target import Target
    from itercast.microbench.store import Row

Explain = Annotated[
    bool,
    typer.Option(
        "--explain-assumptions",
        help="list the assumed numbers, the time that rests on each, and their sources",
    ),
]

Policy = Annotated[
    Path | None,
    file_to_write("what layers save under recompute=budget: JSON for itercast.api.checkpoint"),
]


@asks
@without_garbage_collection()
def predict(
    question: Question,
    cluster: Cluster = None,
    strict: Annotated[bool, typer.Option(help="exit code 1 if an op has no learned model")] = False,
    trace: Trace = None,
    policy: Policy = None,
    prices: Prices = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="the step's distribution: its ranks are noisy")
    ] = False,
    explain_assumptions: Explain = False,
    as_json: Json = False,
) -> None:
    """Forecast one iteration of a model: a named case, a configuration, or a model of your own."""
    if cluster is not None:
        others = (strict, trace, question.input, policy, spread)
        forecast, facts = _on_cluster(question, cluster, alone=not any(others))
        facts |= _price(forecast, prices)
        facts["assumes"] = assumes([forecast])
        _print(question.name, forecast, facts, None, as_json=as_json, explain=explain_assumptions)
        return
    step, target = question.prepared(whole=trace is not None)  # a timeline shows every op
    from itercast.commands.shared import write_trace
    from itercast.compose.target import forecast_step

    forecast = forecast_step(step, target)
    if strict and forecast.unmodelled_frac > 0:
        raise typer.Exit(_not_modelled(forecast, step, target))
    if trace is not None:
        write_trace(trace, "step", step, target)
    if policy is not None:
        function_of("checkpoints", "write")(policy, step, target)
    noisy = function_of("spreads", "step")(forecast, target) if spread else None
    facts = question_facts(question, step, target, forecast) | _machine_facts(step, target)
    facts |= _price(forecast, prices)
    _print(question.name, forecast, facts, noisy, as_json=as_json, explain=explain_assumptions)


def _machine_facts(step: StepCapture, target: Target) -> Row:
    """``machine``: lines on what measured steps said of the machine, and which to measure next."""
    if not (lines := machine_lines(target)):
        return {}
    from itercast.compose.measured_step import MeasuredStep

    asked = MeasuredStep(name=target.model, time_us=1.0, step=step, target=target)
    advice = function_of("anchors", "next_run")(asked)
    return {"machine": [*lines, advice] if advice else lines}


def _price(forecast: Forecast, prices: Path | None) -> Row:
    """What a step costs by a file of prices."""
    if prices is None:
        return {}
    from itercast.compose.prices import bill

    return {"price": bill(forecast, prices)}


def _on_cluster(question: Question, cluster: Path, *, alone: bool) -> tuple[Forecast, Row]:
    """The forecast on a cluster of unlike GPUs, and its facts.

    ``alone``: none of the command's own options was given that exclude ``--cluster``.
    """
    asked = question.arguments()
    excluded = asked["gpu"] != "cpu" or asked["lengths"] or asked["packed"] or asked["machine"]
    if excluded or not alone:
        options = "--gpu, --lengths, --packed, --machine, --anchor, --strict, --trace, --input, "
        options += "--policy or --spread"
        raise ValueError(f"--cluster goes without {options}")
    with prints_aside():
        answer: tuple[Forecast, Row] = function_of("unlike_gpus", "predict")(question, cluster)
    return answer


def _print(
    name: str, forecast: Forecast, facts: Row, spread: Any, *, as_json: bool, explain: bool
) -> None:
    """Print a forecast as one JSON object or as tables."""
    from itercast.commands.shared import add_parts, forecast_table

    if as_json:
        shown: dict[str, object] = {"spread": asdict(spread)} if spread else {}
        if explain:
            parts = function_of("assumed_parts", "list")(forecast)
            shown["assumptions"] = [asdict(part) for part in parts]
        typer.echo(json.dumps({"case": name, **asdict(forecast), **facts, **shown}))
        return
    say_step(facts)
    table = forecast_table(name, forecast, spread)
    for unit, usd in facts.get("price", {}).items():
        table.add_row(unit.replace("usd_per_", "USD per ").replace("_", " "), three_digits(usd))
    add_parts(table, forecast)
    print_tables(table)
    if explain:
        function_of("assumed_parts", "print")(forecast)


def _not_modelled(forecast: Forecast, step: StepCapture, target: Target) -> int:
    """Print which ops have no model; returns exit code 1."""
    from itercast.compose.graph.launch_modes import as_launched
    from itercast.compose.pricing.priced_op import UNMODELLED, priceable

    ops = target.book.price([priceable(c) for c in as_launched(step).calls])
    names = sorted({op.op for op in ops if op.family == UNMODELLED})
    share = f"{100 * forecast.unmodelled_frac:.1f} % of the time has no learned model"
    typer.echo(f"itercast: {share}: {', '.join(names or ['collectives'])}", err=True)
    return 1
