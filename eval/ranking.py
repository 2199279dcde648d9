"""How well forecasts rank the plans of a model, and which plan they would choose.

Only plans of the same step are compared: of one model, with equal samples and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from itercast.eval.results import CaseResult

FEWEST = 3  # a step with fewer measured plans gets no ranking
CLOSE_PCT = 5.0  # a chosen plan counts as good if it is at most this much slower than the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Kendall's tau-b between forecast and measured time over the plans of one step of a model.

    ``retest_tau`` is the tau between two rounds of measurements (the noise floor); None where fewer
    than three plans were measured twice.
    """

    model: str
    ranks: int
    plans: int
    kendall_tau: float
    retest_tau: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan with the best forecast for a step of a model, and how it measured.

    ``slower_pct``: how much slower it is than the plan that measured best.
    """

    model: str
    ranks: int
    plans: int
    chosen: str
    best: str
    slower_pct: float


def rankings(results: Sequence[CaseResult]) -> list[Ranking]:
    """Rankings of all steps with at least three measured plans; one process counts as a plan."""
    ranked = []
    for plans in _by_step(results):
        if len({r.plan for r in plans}) < FEWEST:
            continue
        twice = [r for r in plans if len(r.rounds_us) > 1]
        retest = _tau([(r.rounds_us[0], r.rounds_us[-1]) for r in twice])
        ranked.append(
            Ranking(
                model=plans[0].model,
                ranks=plans[0].ranks,
                plans=len(plans),
                kendall_tau=_tau([(r.predicted_us, r.measured_us) for r in plans]),
                retest_tau=retest if len(twice) >= FEWEST else None,
            )
        )
    return ranked


def _tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of pairs of times; 1 of a single pair."""
    return float(kendalltau(*zip(*pairs, strict=True)).statistic) if len(pairs) > 1 else 1.0


def choices(results: Sequence[CaseResult]) -> list[Choice]:
    """Choices for every step with at least two measured plans."""
    chosen_plans = []
    for plans in _by_step(results):
        if len({r.plan for r in plans}) < 2:
            continue
        chosen = min(plans, key=lambda r: r.predicted_us)
        best = min(plans, key=lambda r: r.measured_us)
        chosen_plans.append(
            Choice(
                model=chosen.model,
                ranks=chosen.ranks,
                plans=len(plans),
                chosen=chosen.plan,
                best=best.plan,
                slower_pct=100 * (chosen.measured_us / best.measured_us - 1),
            )
        )
    return chosen_plans


def ranking_metrics(results: Sequence[CaseResult]) -> dict[str, float]:
    """Metrics of ``rankings`` and ``choices``; those of empty lists are missing.

    ``kendall_tau``, ``kendall_tau_least``: mean and smallest over steps; ``kendall_tau_retest``:
    mean between two rounds of measurements. ``chosen_close_frac``: share of ``choices`` at most
    CLOSE_PCT slower than the best plan; ``choices``: how many there are.
    """
    ranked, chosen = rankings(results), choices(results)
    close = [c.slower_pct <= CLOSE_PCT for c in chosen]
    metrics: dict[str, float] = {}
    if ranked:
        taus = [r.kendall_tau for r in ranked]
        metrics |= {"kendall_tau": float(np.mean(taus)), "kendall_tau_least": min(taus)}
        retests = [r.retest_tau for r in ranked if r.retest_tau is not None]
        metrics |= {"kendall_tau_retest": float(np.mean(retests))} if retests else {}
    if chosen:
        metrics |= {"chosen_close_frac": sum(close) / len(close), "choices": float(len(close))}
    return metrics


def ranking_lines(results: Sequence[CaseResult]) -> list[str]:
    """The metrics of ``ranking_metrics`` as sentences; none where there are too few plans."""
    ranked, chosen, lines = rankings(results), choices(results), []
    if ranked:
        each = ", ".join(f"{r.model} on {r.ranks} {r.kendall_tau:.2f} ({r.plans})" for r in ranked)
        metrics = ranking_metrics(results)
        floor = metrics.get("kendall_tau_retest")
        noise = f" (two rounds of measurements: {floor:.2f})" if floor is not None else ""
        lines.append(
            f"ranking of a model's plans of one batch on as many ranks: Kendall tau "
            f"{metrics['kendall_tau']:.2f} on average{noise}; by model (plans): {each}"
        )
    if chosen:
        close = sum(c.slower_pct <= CLOSE_PCT for c in chosen)
        text = (
            f"chosen plan against the best measured plan of such a step: within {CLOSE_PCT:g} % "
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


def _by_step(results: Sequence[CaseResult]) -> Iterator[list[CaseResult]]:
    """The plans of each step: equal in model, number of ranks and number of samples."""
    groups: dict[tuple[str, int, int], list[CaseResult]] = {}
    for r in results:
        groups.setdefault((r.model, r.ranks, r.samples), []).append(r)
    yield from groups.values()
