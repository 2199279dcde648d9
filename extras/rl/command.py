"""``itercast rl``: forecasts iterations of rollouts and a learner."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from itercast.capture.base.durations import counted, seconds
from itercast.eval.tables import beside_output, print_tables
from itercast.options import Cores, Json, Question, asks
from itercast.outputs import file_to_write
from itercast.stated import question_facts, say_step

if TYPE_CHECKING:
    from itercast.capture.input.lane import InputLane
    from itercast.extras.rl.rollouts import LoopTime

MS = 1e-3
Environment = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION|TIME|FILE",
        help="a function that returns an environment as Gymnasium's, the time of its step "
        "(3ms), or a file that --out wrote",
    ),
]


@partial(asks, without=("input",))
def rl(
    question: Question,
    environment: Environment,
    envs: Annotated[int, typer.Option(min=1, help="environments of each replica")] = 8,
    horizon: Annotated[int, typer.Option(min=1, help="steps of each in an iteration")] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="passes of the learner over them")] = 4,
    workers: Annotated[
        int, typer.Option(min=0, help="processes that step environments; 0: that of the policy")
    ] = 1,
    split: Annotated[bool, typer.Option("--split", help="rollouts on a GPU of their own")] = False,
    cores: Cores = None,
    budget: Annotated[str, typer.Option(help="time to measure for")] = "15s",
    limit: Annotated[int, typer.Option(min=1, help="seconds that a step may take")] = 60,
    out: Annotated[Path | None, file_to_write("file to write: the measured environment")] = None,
    as_json: Json = False,
) -> None:
    """Forecast iterations of PPO and its like: rollouts of environments and a policy, a learner.

    --batch is the learner's minibatch on each replica.
    """
    from itercast.capture.input.lane import write_lane
    from itercast.compose.target import forecast_step
    from itercast.extras.rl.rollouts import best_workers, loop_time, make_loop

    acting, target = replace(question, batch=envs, mode="infer").prepared()
    captures = acting, question.prepared()[0]
    lane = _lane(environment, seconds(budget), limit)
    if out is not None:
        write_lane(lane, out)
    facts = question_facts(question, captures[1], target, forecast_step(captures[1], target))
    sizes = {"envs": envs, "workers": workers, "horizon": horizon, "epochs": epochs}
    own, other = (
        make_loop(captures, target, lane, cores=cores or 0, apart=apart, **sizes)
        for apart in (split, not split)
    )
    found = [loop_time(lane, own), loop_time(lane, other), *best_workers(lane, own)]
    steps = envs * horizon * target.plan.dp
    if as_json:
        typer.echo(json.dumps({**facts, "steps": steps, "loops": list(map(asdict, found))}))
    else:
        say_step(facts)
        print_tables(_table(question.name, steps, found))


def _lane(environment: str, budget_s: float, limit_s: int) -> InputLane:
    """The environment's lane: read, measured, or of a step whose time is known."""
    from itercast.capture.input.lane import Batches, InputLane, read_lane

    if environment.endswith(".json"):
        return read_lane(Path(environment))
    if ":" in environment:
        from itercast.extras.rl.environment import measured_environment

        with beside_output().status(f"measuring {environment}"):
            return measured_environment(environment, budget_s, limit_s)
    us = 1e6 * seconds(environment, "environment")
    step = Batches(wall_us=(us,), cpu_us=(us,))
    return InputLane(
        loader=environment,
        workers=1,
        prefetch=1,
        batch_samples=1,
        batch_bytes=0,
        cores=os.cpu_count() or 1,
        alone=step,
        worker=step,
    )


def _table(name: str, steps: int, found: list[LoopTime]) -> Table:
    """The stages of the first iteration, and all iterations."""
    own = found[0].loop
    title = f"{name}: {own.envs} environments, {counted(own.workers, 'worker')}"
    table = Table(title=title, show_header=False)
    stages = {
        "environments": f"{own.horizon} steps of each",
        "messages": "to workers and back",
        "policy": counted(own.horizon, "forward"),
        "learner": counted(own.updates, "update"),
    }
    for stage, what in stages.items():
        table.add_row(stage, f"{found[0].stages_us[stage] * MS:.1f} ms: {what}")
    for at, one in enumerate(found):
        way = "apart, weights one iteration old" if one.loop.apart else "in turns"
        rate = steps / one.iteration_us * 1e6
        us = f"{one.iteration_us * MS:.1f} ms, {rate:.0f} steps/s, limited by {one.limit}"
        table.add_row(way if at < 2 else counted(one.loop.workers, "worker"), us)
    return table
