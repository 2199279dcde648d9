"""What a campaign measures: its plans, their stages and seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from microbench.campaign import smoke
from microbench.campaign.summary import summary
from microbench.hardware.spec import gpu_from_dict
from microbench.iterations.collect import collect_iterations, measured_iterations
from microbench.iterations.gpu_list import FIRST, gpu_iterations
from microbench.ops import families
from microbench.sweep.cards import card_facts
from microbench.sweep.collect import collect_for
from microbench.sweep.orders import known_families

log = logging.getLogger("itercast.campaign")
RETEST_EVERY = 10  # iterations
SMOKE_ITERATION = 0.3  # of the smoke stage
RETEST = 0.3  # of the second pass


@dataclass(slots=True, kw_only=True)
class Run:
    """Where a stage's rows go; ``points`` are those of a file, ``told`` lines for the summary."""

    root: Path
    seed: int
    points: Path | None
    told: list[str] = field(default_factory=list)
    on_progress: Callable[[], None] = lambda: None

    def tell(self, line: str) -> None:
        """For the log now and for the summary at the end."""
        log.info("%s", line)
        self.told.append(line)

    def progress(self, *_: object) -> None:
        """What sweeps call a few times a second."""
        self.on_progress()

    def sweep(
        self, names: Sequence[str] | None, given_s: float, late_s: float, wanted: Path | None = None
    ) -> int:
        """A sweep on the GPU by the clock."""
        return collect_for(
            self.root, "cuda", names, given_s, self.seed, self.progress, wanted, late_s
        )


def smoked(run: Run, given_s: float, late_s: float) -> int:
    """A few points of every family and one iteration, summed up; what makes no sense is told."""
    begin_s = time.monotonic()
    rows = run.sweep(None, (1 - SMOKE_ITERATION) * given_s, late_s)
    left_s = given_s - (time.monotonic() - begin_s)
    rows += _iterations(run, slice(1), 0, left_s, late_s)
    gpu = gpu_from_dict(card_facts(run.root, "cuda")["hardware"], str(run.root))
    for line in summary(run.root, gpu.name):
        log.info("%s", line)
    alone = tuple(n for n in known_families(None) if families()[n].ranks == 1)
    for line in smoke.check(run.root, gpu, alone):
        run.tell(f"smoke: {line}")
    return rows


def ops(run: Run, given_s: float, late_s: float) -> int:
    """Points of all families."""
    return run.sweep(None, given_s, late_s)


def iterations(run: Run, given_s: float, late_s: float) -> int:
    """Whole training iterations, as far as the time goes."""
    return _iterations(run, slice(None), 0, given_s, late_s)


def some_iterations(run: Run, given_s: float, late_s: float) -> int:
    """Those at the head of the list, which have every kind."""
    return _iterations(run, slice(len(FIRST)), 0, given_s, late_s)


def second(run: Run, given_s: float, late_s: float) -> int:
    """A tenth of the iterations again; then points where models disagree, else random ones."""
    begin_s = time.monotonic()
    gpu = card_facts(run.root, "cuda")["hardware"]["name"]
    known = measured_iterations(run.root, gpu)
    again = [one for one in gpu_iterations() if one in known][::RETEST_EVERY]
    rows = collect_iterations(run.root, "cuda", again, 1, run.progress, RETEST * given_s, late_s)
    names = tuple(n for n in known_families(None) if n != "host")  # few points, all known
    return rows + run.sweep(names, given_s - (time.monotonic() - begin_s), late_s, run.points)


def points(run: Run, given_s: float, late_s: float) -> int:
    """The points of a file and no others."""
    return run.sweep(None, given_s, late_s, run.points)


def _iterations(run: Run, which: slice, repeat: int, given_s: float, late_s: float) -> int:
    wanted = gpu_iterations()[which]
    return collect_iterations(run.root, "cuda", wanted, repeat, run.progress, given_s, late_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a plan; ``seconds`` are those of a run that has the plan's whole time.

    With less than ``least_s`` it is not begun: a worker would do little but start. ``measure``
    takes the seconds it is given, and how long after them its worker is ended.
    """

    name: str
    seconds: float
    measure: Callable[[Run, float, float], int]
    least_s: float = 5.0


PLANS: dict[str, tuple[Stage, ...]] = {
    "first": (
        Stage(name="smoke", seconds=60, measure=smoked, least_s=30),
        Stage(name="ops", seconds=540, measure=ops),
        Stage(name="iterations", seconds=300, measure=iterations),
        Stage(name="second", seconds=240, measure=second),
    ),
    # a GPU to be forecast from others: their points, and iterations to compare with
    "unseen": (
        Stage(name="points", seconds=180, measure=points),
        Stage(name="iterations", seconds=240, measure=some_iterations),
    ),
}


def chosen_stages(plan: str, parts: Sequence[str]) -> tuple[Stage, ...]:
    """The parts asked for, in the plan's order; ValueError for an unknown one."""
    known = {stage.name: stage for stage in PLANS[plan]}
    for name in parts:
        if name not in known:
            raise ValueError(f"part {name!r}: plan {plan} has {', '.join(known)}")
    return tuple(s for s in PLANS[plan] if not parts or s.name in parts)
