"""Forecasts beside measurements of DLRMs: errors of iterations, and of the choice of a sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compose.parallel.placement import Sharding
from compose.sharding.costs import Costs
from compose.sharding.forecast import forecast_sharding
from compose.sharding.propose import greedy_by, improve, random_sharding, table_costs, torchrec_us
from compose.sharding.tables import RankingModel
from compose.target import find_target
from eval.recommenders.measure import measure
from eval.recommenders.tasks import Candidate, any_configuration, any_sharding, heavy_task
from learners.train import errors

WITHIN = 1.10  # of the fastest measured: the published criterion of a successful choice
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate's forecast in us and its measured rounds in us."""

    candidate: Candidate
    forecast_us: float
    rounds_us: tuple[float, ...]

    @property
    def measured_us(self) -> float:
        """Geometric mean of the rounds."""
        return float(np.exp(np.mean(np.log(self.rounds_us))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How good one method's choices are: regrets, measured / fastest - 1, one per task."""

    name: str
    regrets: tuple[float, ...]

    @property
    def successes(self) -> int:
        """Tasks in which the choice was the fastest, or within 10 % of it."""
        return sum(r <= WITHIN - 1 for r in self.regrets)

    @property
    def fastest(self) -> int:
        """Tasks in which the choice was the fastest of all candidates."""
        return sum(r <= 0 for r in self.regrets)


def judge_iterations(
    count: int, ranks: int, threads: int, bundle: Path, folder: Path, seed: int, progress: Progress
) -> list[Judged]:
    """Forecast and measure random models under random shardings."""
    rng = np.random.default_rng(seed)
    models = [any_configuration(rng) for _ in range(count)]
    candidates = [
        Candidate(name=str(i), model=m, sharding=any_sharding(rng, m, ranks))
        for i, m in enumerate(models)
    ]
    forecasts = [_forecast_us(_costs(c.model, ranks, bundle), c.sharding) for c in candidates]
    rounds = measure(candidates, ranks, threads, folder, progress)
    return [
        Judged(candidate=c, forecast_us=f, rounds_us=r)
        for c, f, r in zip(candidates, forecasts, rounds, strict=True)
    ]


def judge_choices(
    tasks: int, ranks: int, threads: int, bundle: Path, folder: Path, seed: int, progress: Progress
) -> list[list[Judged]]:
    """Forecast and measure the shardings that all methods propose for random heavy tasks."""
    rng = np.random.default_rng(seed)
    by_task, forecasts = [], []
    for _ in range(tasks):
        costs = _costs(heavy_task(rng), ranks, bundle)
        proposed = sharders(costs, rng)
        by_task.append(proposed)
        forecasts += [_forecast_us(costs, c.sharding) for c in proposed]
    rounds = measure([c for some in by_task for c in some], ranks, threads, folder, progress)
    judged = iter(zip(forecasts, rounds, strict=True))
    return [[_judged(c, *next(judged)) for c in some] for some in by_task]


def _judged(candidate: Candidate, forecast_us: float, rounds_us: tuple[float, ...]) -> Judged:
    return Judged(candidate=candidate, forecast_us=forecast_us, rounds_us=rounds_us)


def sharders(costs: Costs, rng: np.random.Generator) -> list[Candidate]:
    """Proposes shardings: at random, by six greedy rules, and by a search on our forecast."""
    model = costs.model
    found = {"random": random_sharding(rng, model, costs.world_size)}
    for name, cost in table_costs(costs).items():
        found[f"greedy by {name}"] = greedy_by(cost, costs)
    best = min((forecast_sharding(s, costs) for s in found.values()), key=lambda f: f.iteration_us)
    found["search"] = improve(best, costs).sharding
    return [Candidate(name=n, model=model, sharding=s) for n, s in found.items()]


def choices(judged: Sequence[Sequence[Judged]], ranks: int, bundle: Path) -> list[Choice]:
    """How well itercast, torchrec's formulas and a random pick choose among the proposals."""
    by_name: dict[str, list[float]] = {"itercast": [], "torchrec's formulas": [], "random pick": []}
    for task in judged:
        fastest_us = min(j.measured_us for j in task)
        regret = {id(j): j.measured_us / fastest_us - 1 for j in task}
        costs = _costs(task[0].candidate.model, ranks, bundle)
        ours = min(task, key=lambda j: j.forecast_us)
        theirs = min(task, key=lambda j: _slowest_rank_us(costs, j.candidate.sharding))
        by_name["itercast"].append(regret[id(ours)])
        by_name["torchrec's formulas"].append(regret[id(theirs)])
        by_name["random pick"].append(float(np.mean(list(regret.values()))))
    return [Choice(name=name, regrets=tuple(found)) for name, found in by_name.items()]


def _slowest_rank_us(costs: Costs, sharding: Sharding) -> float:
    """Cost of the slowest rank by torchrec's formulas; parts of a table cost their share."""
    spent = np.zeros(costs.world_size)
    for table, place in zip(costs.model.tables, sharding, strict=True):
        spent[list(place.ranks)] += torchrec_us(table, costs) / len(place.ranks)
    return float(spent.max())


_known: dict[tuple[RankingModel, int, Path], Costs] = {}


def _costs(model: RankingModel, ranks: int, bundle: Path) -> Costs:
    key = (model, ranks, bundle)
    if key not in _known:
        _known[key] = Costs(model, find_target("cpu", f"dp={ranks}", bundle), ranks)
    return _known[key]


def _forecast_us(costs: Costs, sharding: Sharding) -> float:
    return forecast_sharding(sharding, costs).iteration_us


def error_statistics(judged: Sequence[Judged]) -> dict[str, float]:
    """Errors of forecasts in %, and ``retest_ape_pct``: of the last round against the first."""
    forecasts = np.array([j.forecast_us for j in judged])
    measured = np.array([j.measured_us for j in judged])
    first, last = np.array([(j.rounds_us[0], j.rounds_us[-1]) for j in judged]).T
    retest_pct = errors(last, first)["geomean_ape_pct"]
    return {**errors(forecasts, measured), "retest_ape_pct": retest_pct}
