"""``itercast input``: measures a DataLoader, and says whether a step waits for its batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from itercast.capture.base.durations import seconds
from itercast.eval.tables import beside_output, print_tables
from itercast.options import Cores, Json, Question, asks
from itercast.outputs import file_to_write
from itercast.stated import question_facts, say_step

if TYPE_CHECKING:
    from itercast.capture.input.lane import InputLane
    from itercast.capture.opcall import StepCapture
    from itercast.compose.target import Target
    from itercast.extras.input.pipeline import Consumer, Fed
    from itercast.microbench.store import Row

MS = 1e-3


@partial(asks, without=("input",))
def input_lane(
    question: Question | None,
    loader: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:LOADER|FILE",
            help="a DataLoader, a function that returns one, or a file that --out wrote",
        ),
    ],
    step: Annotated[str, typer.Option(help="a step's time, instead of a forecast: 20ms, 1s")] = "",
    workers: Annotated[
        int | None, typer.Option(min=0, help="workers to forecast; default: the loader's own")
    ] = None,
    cores: Cores = None,
    budget: Annotated[str, typer.Option(help="time to measure for")] = "40s",
    limit: Annotated[int, typer.Option(min=1, help="seconds that a batch may take")] = 60,
    copied_ahead: Annotated[
        bool, typer.Option("--copied-ahead", help="the loop copies batches beside the step before")
    ] = False,
    tier_gb: Annotated[
        float, typer.Option(min=0, help="GB on a fast tier (memory, NVMe): which files to stage")
    ] = 0.0,
    out: Annotated[Path | None, file_to_write("file that `predict --input` reads")] = None,
    as_json: Json = False,
) -> None:
    """Measure a DataLoader stage by stage; say whether a forecast step waits for its batches."""
    from itercast.capture.input.lane import read_lane, write_lane

    if step and question is not None:
        raise ValueError("a step is --step or a forecast model: give one of them")
    step_us = 1e6 * seconds(step, "step") if step else 0.0
    prepared = question.prepared() if question is not None else None  # refused before measuring
    if loader.endswith(".json"):
        lane = read_lane(Path(loader))
    else:
        from itercast.extras.input.process import measured_lane

        with beside_output().status(f"measuring {loader}"):
            lane = measured_lane(loader, seconds(budget), limit)
    own = lane.workers if workers is None else workers
    lane = replace(lane, workers=own, copied_ahead=copied_ahead or lane.copied_ahead)
    if out is not None:
        write_lane(lane, out)
    if prepared is not None:
        from itercast.extras.input.pipeline import on_host

        lane = on_host(lane, prepared[1].node)
    who, taker, share, facts = _consumer(question, prepared, step_us, lane, cores or 0)
    if facts and not as_json:
        say_step(facts)
    if tier_gb and not lane.files:
        raise ValueError("tier-gb stages files, and the loader was not seen to open any")
    _print(lane, who, taker, share, facts, tier_gb, as_json=as_json)


def _consumer(
    question: Question | None,
    prepared: tuple[StepCapture, Target] | None,
    step_us: float,
    lane: InputLane,
    cores: int,
) -> tuple[str, Consumer | None, float, Row]:
    """Describes the step that takes the batches: name, step, a rank's cores, and facts for JSON.

    The step is None where neither a model nor a step's time is given.
    """
    from itercast.extras.input.pipeline import Consumer, consumer, cores_of_a_rank

    if question is None or prepared is None:
        step = Consumer(host_us=step_us) if step_us else None
        return f"a step of {step_us * MS:.1f} ms", step, cores or lane.cores, {}
    captured, target = prepared
    from itercast.compose.target import forecast_step

    forecast = forecast_step(captured, target)
    samples = captured.samples * target.plan.microbatches
    step = consumer(forecast, lane, target, samples)
    name = f"{question.name} on {forecast.gpu}"
    facts = question_facts(question, captured, target, forecast)
    return name, step, cores_of_a_rank(lane, target, forecast.world_size, cores), facts


def _print(
    lane: InputLane,
    who: str,
    step: Consumer | None,
    cores: float,
    facts: Row,
    tier_gb: float,
    *,
    as_json: bool,
) -> None:
    """Print the lane and the step that it feeds, as tables or as JSON."""
    from itercast.extras.input.pipeline import fed, fewest_workers

    own = fed(lane, step, lane.workers, cores) if step else None
    best = fewest_workers(lane, step, cores) if step else None
    kept = _kept(lane, step, cores, tier_gb) if step and own and own.input_bound else {}
    if as_json:
        kept_us = {name: without.iteration_us for name, without in kept.items()}
        typer.echo(json.dumps({**facts, **_lane_facts(lane, own, best), "if_kept_us": kept_us}))
        return
    print_tables(_lane_table(lane, cores))
    if own and best:
        print_tables(_step_table(who, own, best, kept))


def _kept(lane: InputLane, step: Consumer, cores: float, tier_gb: float) -> dict[str, Fed]:
    """Iterations if the loader changed: files on a fast tier, decoded items kept in memory.

    With ``tier_gb`` also a tier of that size, holding the files that batches wait longest for.
    """
    from itercast.extras.input.pipeline import fed

    left_out = {
        "files on a fast tier": ("waiting",),
        "decoded items in memory": ("waiting", "decode"),
    }
    timed = [name for name, stages in left_out.items() if stages[-1] in lane.stages_us]
    lanes = {name: lane.without(*left_out[name]) for name in timed}
    if tier_gb:
        shares, staged = lane.staged(1e9 * tier_gb)
        staged_kinds = ", ".join(f"{kind} ({share:.0%})" for kind, share in shares.items())
        lanes[f"{tier_gb:g} GB: {staged_kinds or 'no file that is waited for'}"] = staged
    return {name: fed(without, step, lane.workers, cores) for name, without in lanes.items()}


def _lane_facts(lane: InputLane, own: Fed | None, best: Fed | None) -> dict[str, object]:
    """A lane for JSON: means instead of single batches, and the step that it feeds.

    ``own``: with the loader's own number of workers; ``best``: with the fewest that are enough.
    """
    facts = asdict(lane)
    for name in ("alone", "worker"):
        times = getattr(lane, name)
        facts[name] = {"wall_us": times.mean_us, "cpu_us": times.mean_cpu_us}
    steps = {
        name: {**asdict(step), "input_bound": step.input_bound}
        for name, step in (("own", own), ("fewest", best))
        if step is not None
    }
    return {**facts, **steps}


def _lane_table(lane: InputLane, cores: float) -> Table:
    """The stages of a batch, and what the loader yields with several numbers of workers."""
    from itercast.extras.input.pipeline import Consumer, fed

    table = Table(title=f"{lane.loader}: batches of {lane.batch_samples}", show_header=False)
    for name, us in lane.stages_us.items():
        table.add_row(name, f"{us * MS:.2f} ms")
    table.add_row("bytes of a batch", f"{lane.batch_bytes / 1e6:.1f} MB")
    for group in lane.files:
        size = f"{group.files:,} of {group.nbytes / 1e9:.3g} GB an epoch"
        table.add_row(group.kind, f"{size}, {group.waiting_us * MS:.2f} ms of waiting a batch")
    counts = sorted({0, 1, 2, 4, 8, lane.workers})
    for workers in counts:
        if not (lane.worker if workers else lane.alone).wall_us:
            continue
        fed_step = fed(lane, Consumer(), workers, cores)
        rate = lane.batch_samples / fed_step.iteration_us * 1e6
        own = " (its own)" if workers == lane.workers else ""
        table.add_row(
            f"{workers} workers{own}", f"{rate:.0f} samples/s, limited by {fed_step.stage}"
        )
    return table


def _step_table(who: str, own: Fed, best: Fed, kept: Mapping[str, Fed]) -> Table:
    """The verdict, and the number of workers that a step takes."""
    table = Table(title=who, show_header=False)
    table.add_row("step alone", f"{own.alone_us * MS:.2f} ms")
    late = [("input bound", "red"), f", by {own.stage}"] if own.input_bound else ["not input bound"]
    step = Text.assemble(f"{own.iteration_us * MS:.2f} ms, ", *late)
    table.add_row(f"with {own.workers} workers", step)
    if own.burst:
        table.add_row("full queues last", f"{own.burst:.1f} iterations")
    table.add_row("cores in use", f"{own.cores_used:.1f}")
    rest = "" if not best.input_bound else f", still limited by {best.stage}"
    table.add_row("workers needed", f"{best.workers}: {best.iteration_us * MS:.2f} ms{rest}")
    for name, step_kept in kept.items():
        table.add_row(name, f"{step_kept.iteration_us * MS:.2f} ms, by {step_kept.stage}")
    return table
