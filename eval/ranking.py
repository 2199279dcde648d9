"""Plans of one model put in order: how well forecasts rank them, and what the best forecast costs.

Plans differ in ranks and samples, so they are ordered by time per sample of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from eval.results import CaseResult

FEWEST = 3  # plans of a model that make a ranking
CLOSE_PCT = 5.0  # a chosen plan this much slower than the best one is as good


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Kendall's tau-b of forecasts against measurements over the plans of one model.

    ``retest_tau`` is that of two rounds of measurements: the noise floor; None for too few plans.
    """

    model: str
    plans: int
    kendall_tau: float
    retest_tau: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan with the best forecast among those of a model on as many ranks, once measured."""

    model: str
    ranks: int
    plans: int
    chosen: str
    best: str
    slower_pct: float  # the chosen plan's measured time over the best measured one's


def rankings(results: Sequence[CaseResult]) -> list[Ranking]:
    """Of every model with at least three measured plans; one process is a plan."""
    found = []
    for model, mine in _by(results, lambda r: r.model).items():
        if len({r.plan for r in mine}) < FEWEST:
            continue
        twice = [r for r in mine if len(r.rounds_us) > 1]
        retest = _tau([(r.rounds_us[0] / r.samples, r.rounds_us[-1] / r.samples) for r in twice])
        found.append(
            Ranking(
                model=str(model),
                plans=len(mine),
                kendall_tau=_tau(
                    [(r.predicted_us / r.samples, r.measured_us / r.samples) for r in mine]
                ),
                retest_tau=retest if len(twice) >= FEWEST else None,
            )
        )
    return found


def _tau(pairs: Sequence[tuple[float, float]]) -> float:
    return float(kendalltau(*zip(*pairs, strict=True)).statistic) if len(pairs) > 1 else 1.0


def choices(results: Sequence[CaseResult]) -> list[Choice]:
    """Of every model and number of ranks with at least two measured plans."""
    found = []
    for mine in _by(results, lambda r: (r.model, r.ranks)).values():
        if len({r.plan for r in mine}) < 2:
            continue
        chosen = min(mine, key=lambda r: r.predicted_us / r.samples)
        best = min(mine, key=lambda r: r.measured_us / r.samples)
        ratio = (chosen.measured_us / chosen.samples) / (best.measured_us / best.samples)
        found.append(
            Choice(
                model=chosen.model,
                ranks=chosen.ranks,
                plans=len(mine),
                chosen=chosen.plan,
                best=best.plan,
                slower_pct=100 * (ratio - 1),
            )
        )
    return found


def ranking_metrics(results: Sequence[CaseResult]) -> dict[str, float]:
    """Mean and least tau over models, and the share of choices within 5 % of the best plan."""
    taus = [r.kendall_tau for r in rankings(results)]
    chosen = choices(results)
    close = [c.slower_pct <= CLOSE_PCT for c in chosen]
    metrics: dict[str, float] = {}
    if taus:
        metrics |= {"kendall_tau": float(np.mean(taus)), "kendall_tau_least": min(taus)}
        floors = [r.retest_tau for r in rankings(results) if r.retest_tau is not None]
        metrics |= {"kendall_tau_retest": float(np.mean(floors))} if floors else {}
    if chosen:
        metrics |= {"chosen_close_frac": sum(close) / len(close), "choices": float(len(close))}
    return metrics


def ranking_lines(results: Sequence[CaseResult]) -> list[str]:
    """The same in words; nothing where there are too few plans."""
    ranked, chosen, lines = rankings(results), choices(results), []
    if ranked:
        each = ", ".join(f"{r.model} {r.kendall_tau:.2f} ({r.plans})" for r in ranked)
        metrics = ranking_metrics(results)
        floor = metrics.get("kendall_tau_retest")
        noise = f" (two rounds of measurements: {floor:.2f})" if floor is not None else ""
        lines.append(
            f"ranking of a model's plans by time per sample: Kendall tau "
            f"{metrics['kendall_tau']:.2f} on average{noise}; by model (plans): {each}"
        )
    if chosen:
        close = sum(c.slower_pct <= CLOSE_PCT for c in chosen)
        text = (
            f"chosen plan against the best measured plan on as many ranks: within {CLOSE_PCT:g} % "
            f"in {close} of {len(chosen)} cases"
        )
        far = [c for c in chosen if c.slower_pct > CLOSE_PCT]
        missed = "; ".join(
            f"{c.model} on {c.ranks}: {c.chosen or 'no plan'} is {c.slower_pct:.0f} % slower than "
            f"{c.best or 'no plan'}"
            for c in far
        )
        lines.append(f"{text}; {missed}" if missed else text)
    return lines


def _by(
    results: Sequence[CaseResult], key: Callable[[CaseResult], Hashable]
) -> dict[Hashable, list[CaseResult]]:
    groups: dict[Hashable, list[CaseResult]] = {}
    for r in results:
        groups.setdefault(key(r), []).append(r)
    return groups
