"""The plans of a campaign: their stages, what each measures and for how long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from itercast.capture.base.yaml_text import made_of
from itercast.extras.campaign import smoke
from itercast.extras.campaign.run import Run
from itercast.extras.campaign.summary import summary
from itercast.microbench import store
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.gpu_list import (
    FIRST,
    gpu_iterations,
    iterations_of,
    write_configurations,
)
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.ops import families
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.orders import known_families

log = logging.getLogger("itercast.campaign")
RETEST_EVERY = 10  # iterations
SMOKE_ITERATION_FRAC = 0.3  # of the smoke stage
RETEST_FRAC = 0.3  # of stage second, for iterations
ROUNDS = 3  # of the iterations whose pace the host sets
EVENTS_FRAC = 0.25  # of the hosts' stage, for single events, those of parallel wrappers among them
CORES = 4  # that each of their processes is pinned to
CALLS_FRAC = 0.6  # of the optimizers' stage, for their calls; the rest for whole steps
Measure = Callable[[Run, float, float], int]  # budget in s, s until workers are killed -> rows


def smoke_test(run: Run, budget_s: float, grace_s: float) -> int:
    """Stage "smoke": a few points of every family and one iteration; returns the number of rows.

    Logs a summary, and notes rows that are implausible.
    """
    begin_s = time.monotonic()
    rows = run.sweep(None, (1 - SMOKE_ITERATION_FRAC) * budget_s, grace_s)
    left_s = budget_s - (time.monotonic() - begin_s)
    rows += _iterations(run, gpu_iterations()[:1], left_s, grace_s)
    gpu = made_of(Gpu, card_facts(run.root, "cuda")["hardware"], str(run.root))
    for line in summary(run.root, gpu.name):
        log.info("%s", line)
    on_one_gpu = tuple(n for n in known_families(None) if families()[n].ranks == 1)
    for line in smoke.check(run.root, gpu, on_one_gpu):
        run.note(f"smoke: {line}")
    return rows


def sweep(*names: str, drawn: bool = False) -> Measure:
    """Measures points of these families, of all without names: those of the campaign's file.

    ``drawn``: points of each family's own sweep instead.
    """
    return lambda run, budget_s, grace_s: run.sweep(
        names or None, budget_s, grace_s, None if drawn else run.points
    )


def steps(most: int | None = None) -> Measure:
    """Measures training iterations, as many as fit the budget; the first ones have every kind."""
    return lambda run, budget_s, grace_s: _iterations(
        run, gpu_iterations()[:most], budget_s, grace_s
    )


def second(run: Run, budget_s: float, grace_s: float) -> int:
    """Measure a tenth of the iterations once more, then sweep further points with the time left.

    The points are those of the campaign's file where it has one, else new ones of all families.
    """
    begin_s = time.monotonic()
    gpu = card_facts(run.root, "cuda")["hardware"]["name"]
    measured = measured_iterations(run.root, gpu)
    again = [i for i in gpu_iterations() if i in measured][::RETEST_EVERY]
    rows = _iterations(run, again, RETEST_FRAC * budget_s, grace_s, repeat=1)
    names = tuple(
        n for n in known_families(None) if not families()[n].on_host
    )  # has few points, all measured by now
    return rows + run.sweep(names, budget_s - (time.monotonic() - begin_s), grace_s, run.points)


def hosts(run: Run, budget_s: float, grace_s: float) -> int:
    """Stage "hosts": time host events, then steps that the host bounds; returns the number of rows.

    Each round has another order and an equal share of the time left; processes are pinned.
    """
    end_s = time.monotonic() + budget_s
    rows = run.sweep(("host",), EVENTS_FRAC * budget_s, grace_s, None)
    for repeat in range(ROUNDS):
        wanted = iterations_of("hosts")
        random.Random(f"{run.seed} {repeat}").shuffle(wanted)
        left_s = (end_s - time.monotonic()) / (ROUNDS - repeat)
        rows += _iterations(run, wanted, left_s, grace_s, repeat=repeat, cores=CORES)
    return rows


def optimizers(run: Run, budget_s: float, grace_s: float) -> int:
    """Sweep optimizer calls of the campaign's file; then whole steps, some in CUDA graphs."""
    end_s = time.monotonic() + budget_s
    rows = run.sweep(("optimizer",), CALLS_FRAC * budget_s, grace_s, run.points)
    return rows + _iterations(run, iterations_of("optimizers"), end_s - time.monotonic(), grace_s)


def held_out(run: Run, budget_s: float, grace_s: float) -> int:
    """Measure iterations of networks that nothing was swept for."""
    write_configurations(run.root)
    return _iterations(run, iterations_of("held_out"), budget_s, grace_s)


def _iterations(
    run: Run,
    wanted: Sequence[Iteration],
    budget_s: float,
    grace_s: float,
    *,
    repeat: int = 0,
    cores: int = 0,
) -> int:
    """Measure iterations on the campaign's GPUs; pinned ones, one at a time. The number of rows."""
    devices = 1 if cores else run.devices
    progress = run.progress
    return collect_iterations(
        run.root, "cuda", wanted, repeat, progress, budget_s, grace_s, devices, cores=cores
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a plan; ``seconds`` is its time in a run with the plan's whole budget.

    With less than ``least_s`` it is skipped, as a worker takes most of that to start. ``measure``
    takes the budget in seconds, and the seconds after it until a worker is killed.
    """

    name: str
    seconds: float
    measure: Measure
    least_s: float = 5.0


PLANS: dict[str, tuple[Stage, ...]] = {
    "first": (
        Stage(name="smoke", seconds=60, measure=smoke_test, least_s=30),
        Stage(name="ops", seconds=540, measure=sweep(drawn=True)),
        Stage(name="iterations", seconds=300, measure=steps()),
        Stage(name="second", seconds=240, measure=second),
    ),
    # What the first one left open: hosts, points that models call, models that none was swept for.
    "second": (
        Stage(name="hosts", seconds=360, measure=hosts),
        Stage(name="products", seconds=240, measure=sweep("gemm")),
        Stage(name="attention", seconds=300, measure=sweep("attention")),
        Stage(name="optimizers", seconds=180, measure=optimizers),
        Stage(name="held_out", seconds=120, measure=held_out),
        Stage(name="convolutions", seconds=240, measure=sweep("conv", "norm", "pooling")),
    ),
    # For a GPU that is forecast from others: points measured there, and iterations to compare.
    "unseen": (
        Stage(name="points", seconds=180, measure=sweep()),
        Stage(name="iterations", seconds=240, measure=steps(len(FIRST))),
    ),
}


def chosen_stages(plan: str, parts: Sequence[str]) -> tuple[Stage, ...]:
    """The named stages in the plan's order, all without names; ValueError for unknown names."""
    known = {stage.name: stage for stage in PLANS[plan]}
    for name in parts:
        if name not in known:
            raise ValueError(f"part {name!r}: stages of plan {plan} are {', '.join(known)}")
    return tuple(s for s in PLANS[plan] if not parts or s.name in parts)


def measured_iterations(root: Path, gpu: str) -> set[Iteration]:
    """Iterations that have a row with status ok under a root, of repeat 0."""
    rows = store.read_rows([root], "iteration")
    if rows.empty:
        return set()
    rows = rows[(rows["gpu"] == gpu) & (rows["status"] == "ok") & (rows["repeat"] == 0)]
    names = [f.name for f in fields(Iteration) if f.name in rows]
    stated = rows[names].to_dict("records")  # without what older rows do not say
    return {Iteration(**{str(n): v for n, v in row.items() if v == v}) for row in stated}
