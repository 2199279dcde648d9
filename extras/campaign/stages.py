"""The plans of a campaign: their stages, what each measures and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from itercast.capture.base.yaml_text import made_of
from itercast.extras.campaign import second as again
from itercast.extras.campaign import smoke
from itercast.extras.campaign.run import Run
from itercast.extras.campaign.summary import summary
from itercast.microbench import store
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.gpu_list import FIRST, gpu_iterations
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.ops import families
from itercast.microbench.sweep.cards import card_facts
from itercast.microbench.sweep.orders import known_families

log = logging.getLogger("itercast.campaign")
RETEST_EVERY = 10  # iterations
SMOKE_ITERATION_FRAC = 0.3  # of the smoke stage
RETEST_FRAC = 0.3  # of stage second, for iterations


def smoke_test(run: Run, budget_s: float, grace_s: float) -> int:
    """Stage "smoke": a few points of every family and one iteration; returns the number of rows.

    Logs a summary, and notes rows that are implausible.
    """
    begin_s = time.monotonic()
    rows = run.sweep(None, (1 - SMOKE_ITERATION_FRAC) * budget_s, grace_s)
    left_s = budget_s - (time.monotonic() - begin_s)
    rows += iterations(run, left_s, grace_s, most=1)
    gpu = made_of(Gpu, card_facts(run.root, "cuda")["hardware"], str(run.root))
    for line in summary(run.root, gpu.name):
        log.info("%s", line)
    on_one_gpu = tuple(n for n in known_families(None) if families()[n].ranks == 1)
    for line in smoke.check(run.root, gpu, on_one_gpu):
        run.note(f"smoke: {line}")
    return rows


def ops(run: Run, budget_s: float, grace_s: float) -> int:
    """Sweep points of all families."""
    return run.sweep(None, budget_s, grace_s)


def second(run: Run, budget_s: float, grace_s: float) -> int:
    """Measure a tenth of the iterations once more, then sweep further points with the time left.

    The points are those of the campaign's file where it has one, else new ones of all families.
    """
    begin_s = time.monotonic()
    gpu = card_facts(run.root, "cuda")["hardware"]["name"]
    measured = measured_iterations(run.root, gpu)
    again = [i for i in gpu_iterations() if i in measured][::RETEST_EVERY]
    rows = collect_iterations(
        run.root, "cuda", again, 1, run.progress, RETEST_FRAC * budget_s, grace_s, run.devices
    )
    # Families of the host have few points, all of them measured by now.
    names = tuple(n for n in known_families(None) if not families()[n].on_host)
    return rows + run.sweep(names, budget_s - (time.monotonic() - begin_s), grace_s, run.points)


def points(run: Run, budget_s: float, grace_s: float, names: Sequence[str] | None = None) -> int:
    """Sweep the points of the campaign's file only: of these families, None for all."""
    return run.sweep(names, budget_s, grace_s, run.points)


def iterations(run: Run, budget_s: float, grace_s: float, most: int | None = None) -> int:
    """Measure the first ``most`` of a GPU's list of iterations once; returns the number of rows."""
    wanted = gpu_iterations()[:most]
    return collect_iterations(
        run.root, "cuda", wanted, 0, run.progress, budget_s, grace_s, run.devices
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a plan; ``seconds`` is its time in a run with the plan's whole budget.

    With less than ``least_s`` it is skipped, as a worker takes most of that to start. ``measure``
    takes the budget in seconds, and the seconds after it until a worker is killed.
    """

    name: str
    seconds: float
    measure: Callable[[Run, float, float], int]
    least_s: float = 5.0


PLANS: dict[str, tuple[Stage, ...]] = {
    "first": (
        Stage(name="smoke", seconds=60, measure=smoke_test, least_s=30),
        Stage(name="ops", seconds=540, measure=ops),
        Stage(name="iterations", seconds=300, measure=iterations),
        Stage(name="second", seconds=240, measure=second),
    ),
    # What the first one left open, in three runs of at most ten minutes.
    "second": (
        Stage(name="hosts", seconds=360, measure=again.hosts),
        Stage(name="products", seconds=240, measure=again.products),
        Stage(name="attention", seconds=300, measure=partial(points, names=("attention",))),
        Stage(name="optimizers", seconds=180, measure=again.optimizers),
        Stage(name="held_out", seconds=120, measure=again.held_out),
        Stage(name="convolutions", seconds=240, measure=partial(points, names=again.SHAPED)),
        Stage(name="traces", seconds=240, measure=again.traces),
        Stage(name="transfers", seconds=120, measure=again.transfers),
    ),
    # For a GPU that is forecast from others: points measured there, and iterations to compare.
    "unseen": (
        Stage(name="points", seconds=180, measure=points),
        Stage(name="iterations", seconds=240, measure=partial(iterations, most=len(FIRST))),
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
