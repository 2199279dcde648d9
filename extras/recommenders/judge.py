"""Forecasts beside measurements of DLRMs: errors of iterations, and of the choice of a sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from itercast.compose.target import find_target
from itercast.eval.results import RETEST
from itercast.extras.recommenders.measure import measure
from itercast.extras.recommenders.sharded_model import RankingModel
from itercast.extras.recommenders.sharding.forecast import Forecaster
from itercast.extras.recommenders.sharding.propose import (
    everywhere,
    greedy_by,
    improve,
    random_sharding,
    table_costs,
    torchrec_us,
)
from itercast.extras.recommenders.tables.placement import Sharding
from itercast.extras.recommenders.tasks import (
    Candidate,
    any_configuration,
    any_sharding,
    unequal_task,
)
from itercast.learners.bundle import Bundle
from itercast.learners.train import errors
from itercast.microbench.processes.ranks import threads_of

WITHIN = 1.10  # of the fastest measured: the published criterion of a successful choice
APART = 1.3  # slowest over fastest candidate of a task that can tell ways of choosing apart
FIRST_ROUND = "measuring once"
GREEDY_BY = ("size", "rows", "lookups", "torchrec")
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A model under a sharding: its forecast step in us, and a measured median per round."""

    candidate: Candidate
    forecast_us: float
    rounds_us: tuple[float, ...]

    @property
    def measured_us(self) -> float:
        """Geometric mean of the rounds."""
        return float(np.exp(np.mean(np.log(self.rounds_us))))

    @property
    def error_pct(self) -> float:
        """Signed error of the forecast in %."""
        return 100 * (self.forecast_us / self.measured_us - 1)

    @property
    def retest_pct(self) -> float:
        """How far the last round is from the first, in %."""
        return 100 * abs(self.rounds_us[-1] / self.rounds_us[0] - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How good one method's choices are, by regret: measured / fastest - 1.

    ``regrets`` has for each task those of all candidates that the method may choose, as likely.
    """

    name: str
    regrets: tuple[tuple[float, ...], ...]

    @property
    def successes(self) -> float:
        """Expected number of choices that are the fastest, or within 10 % of it."""
        return self._count(WITHIN - 1)

    @property
    def fastest(self) -> float:
        """Expected number of choices that are the fastest of all candidates."""
        return self._count(0)

    @property
    def means(self) -> list[float]:
        """Expected regret of each task."""
        return [float(np.mean(some)) for some in self.regrets]

    def _count(self, most: float) -> float:
        return float(sum(np.mean([r <= most for r in some]) for some in self.regrets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where steps are forecast and measured: so many processes on this CPU, by one bundle."""

    ranks: int
    bundle: Path
    out: Path

    @property
    def anchor_us(self) -> float:
        """Time of the anchor (a reference task) at the machine speed that forecasts are for."""
        threads = threads_of(self.ranks)
        times = [us for (_, n), (us, _) in Bundle.load(self.bundle).anchors.items() if n == threads]
        if not times:
            raise ValueError(f"{self.bundle} has no reference times with {threads} threads")
        return times[0]

    def forecaster(self, model: RankingModel) -> Forecaster:
        """What forecasts a model's shardings."""
        return _forecaster(model, self.ranks, self.bundle)

    def judge(
        self, candidates: Sequence[Candidate], folder: str, together: int, progress: Progress
    ) -> list[Judged]:
        """Forecast and measure candidates; ``together`` of them take turns."""
        where = self.out / folder
        times_us = measure(candidates, self.ranks, where, together, self.anchor_us, progress)
        return [
            Judged(
                candidate=c,
                forecast_us=self.forecaster(c.model).forecast(c.sharding).iteration_us,
                rounds_us=rounds_us,
            )
            for c, rounds_us in zip(candidates, times_us, strict=True)
        ]


@cache
def _forecaster(model: RankingModel, ranks: int, bundle: Path) -> Forecaster:
    return Forecaster(model, find_target("cpu", f"dp={ranks}", bundle), ranks)


def judge_iterations(bench: Bench, count: int, progress: Progress) -> list[Judged]:
    """Forecast and measure random models under random shardings."""
    rng = np.random.default_rng(1)
    models = [any_configuration(rng) for _ in range(count)]
    candidates = [
        Candidate(name=str(i), model=m, sharding=any_sharding(rng, m, bench.ranks))
        for i, m in enumerate(models)
    ]
    return bench.judge(candidates, "iterations", 1, progress)


def judge_choices(bench: Bench, tasks: int, progress: Progress) -> list[list[Judged]]:
    """Forecast and measure the shardings that all methods propose for random unequal tasks."""
    rng = np.random.default_rng(2)
    by_task = [sharders(bench.forecaster(unequal_task(rng)), rng) for _ in range(tasks)]
    every = [c for some in by_task for c in some]
    judged = iter(bench.judge(every, f"choices-{bench.ranks}", len(by_task[0]), progress))
    return [[next(judged) for _ in some] for some in by_task]


def sharders(forecaster: Forecaster, rng: np.random.Generator) -> list[Candidate]:
    """Proposes seven shardings: at random, by rows, by four greedy rules, by our search."""
    model, n = forecaster.model, forecaster.world_size
    proposed = {"random": random_sharding(rng, model, n)}
    proposed["all row-wise"] = everywhere(model, "row_wise", n)
    costs = table_costs(forecaster)
    for name in GREEDY_BY:
        proposed[f"greedy by {name}"] = greedy_by(costs[name], forecaster)
    best = min((forecaster.forecast(s) for s in proposed.values()), key=lambda f: f.iteration_us)
    proposed["search"] = improve(best, forecaster).sharding
    return [Candidate(name=n, model=model, sharding=s) for n, s in proposed.items()]


def apart(judged: Sequence[Sequence[Judged]]) -> list[Sequence[Judged]]:
    """The tasks whose slowest candidate takes at least 30 % longer than the fastest."""
    times_us = ((task, [j.measured_us for j in task]) for task in judged)
    return [task for task, us in times_us if max(us) >= APART * min(us)]


def choices(judged: Sequence[Sequence[Judged]], bench: Bench) -> list[Choice]:
    """How well itercast, torchrec's formulas and a random pick choose among the proposals.

    They are compared with a choice by the first measured round, judged by the last: no forecast can
    be expected to beat a measurement.
    """
    names = ("itercast", "torchrec's formulas", "random pick", FIRST_ROUND)
    by_name: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for task in judged:
        fastest_us = min(j.measured_us for j in task)
        regret = {id(j): j.measured_us / fastest_us - 1 for j in task}
        forecaster = bench.forecaster(task[0].candidate.model)
        ours = min(task, key=lambda j: j.forecast_us)
        theirs = min(task, key=lambda j: _slowest_rank_us(forecaster, j.candidate.sharding))
        by_name["itercast"].append((regret[id(ours)],))
        by_name["torchrec's formulas"].append((regret[id(theirs)],))
        by_name["random pick"].append(tuple(regret.values()))
        again = min(task, key=lambda j: j.rounds_us[0]).rounds_us[-1]
        by_name[FIRST_ROUND].append((again / min(j.rounds_us[-1] for j in task) - 1,))
    return [Choice(name=name, regrets=tuple(regrets)) for name, regrets in by_name.items()]


def correlations(judged: Sequence[Sequence[Judged]]) -> tuple[float, float]:
    """Correlations of log times within tasks: forecast and measured, first and last round.

    Without noise the second is 1. Where it is near 0, the shardings of a task differ by less than
    the noise of a round.
    """
    times_us = [
        np.array([(j.forecast_us, j.measured_us, j.rounds_us[0], j.rounds_us[-1]) for j in task])
        for task in judged
    ]
    logs = np.concatenate([np.log(us) - np.log(us).mean(axis=0) for us in times_us])
    correlation = np.corrcoef(logs, rowvar=False)
    return float(correlation[0, 1]), float(correlation[2, 3])


def _slowest_rank_us(forecaster: Forecaster, sharding: Sharding) -> float:
    """Cost of the slowest rank by torchrec's formulas; parts of a table cost their share."""
    spent = np.zeros(forecaster.world_size)
    for table, place in zip(forecaster.model.tables, sharding, strict=True):
        spent[list(place.ranks)] += torchrec_us(table, forecaster) / len(place.ranks)
    return float(spent.max())


def error_statistics(judged: Sequence[Judged]) -> dict[str, float]:
    """Errors of forecasts in %, and the noise floor: the median of retests."""
    times = np.array([(j.forecast_us, j.measured_us) for j in judged])
    floor = float(np.median([j.retest_pct for j in judged]))
    return {**errors(times[:, 0], times[:, 1]), RETEST: floor}
