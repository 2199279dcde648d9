"""How well forecasts rank the plans of a model, or software for a call, and what they choose.

Plans differ in ranks and samples per step, so they are compared by time per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from itercast.eval.results import CaseResult

FEWEST = 3  # a model with fewer measured plans gets no ranking
SOFTWARE = ("top1_pct", "top3_pct", "pairwise_pct", "slower_pct")  # see ``software_metrics``
CLOSE_PCT = 5.0  # a chosen plan counts as good if it is at most this much slower than the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Kendall's tau-b between forecast and measured time per sample over the plans of one model.

    ``retest_tau`` is the tau between two rounds of measurements (the noise floor); None where fewer
    than three plans were measured twice.
    """

    model: str
    plans: int
    kendall_tau: float
    retest_tau: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan with the best forecast for a model and number of ranks, and how it measured.

    ``slower_pct``: how much slower it is than the plan that measured best.
    """

    model: str
    ranks: int
    plans: int
    chosen: str
    best: str
    slower_pct: float


def rankings(results: Sequence[CaseResult]) -> list[Ranking]:
    """Rankings of all models with at least three measured plans; one process counts as a plan."""
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
    """Choices for every model and number of ranks with at least two measured plans."""
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
    """Metrics of ``rankings`` and ``choices``; those that no result tells are missing.

    ``kendall_tau*``: mean and smallest over models, mean between two rounds of measurements.
    ``chosen_close_frac``: share of ``choices`` at most CLOSE_PCT slower than the best plan.
    """
    taus = [r.kendall_tau for r in rankings(results)]
    chosen = choices(results)
    close = [c.slower_pct <= CLOSE_PCT for c in chosen]
    metrics: dict[str, float] = {}
    if taus:
        metrics |= {"kendall_tau": float(np.mean(taus)), "kendall_tau_least": min(taus)}
        retests = [r.retest_tau for r in rankings(results) if r.retest_tau is not None]
        metrics |= {"kendall_tau_retest": float(np.mean(retests))} if retests else {}
    if chosen:
        metrics |= {"chosen_close_frac": sum(close) / len(close), "choices": float(len(close))}
    return metrics


def ranking_lines(results: Sequence[CaseResult]) -> list[str]:
    """The metrics of ``ranking_metrics`` as sentences; none where there are too few plans."""
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


def software_metrics(
    call: np.ndarray, stack: np.ndarray, guess: np.ndarray, measured: np.ndarray, fewest: int
) -> dict[str, float]:
    """How well forecasts tell under which software stack each call is the fastest, in %.

    One entry of ``call``, ``stack``, ``guess`` (predicted) and ``measured`` times per row; rows of
    a call under one stack are averaged. Of the ``calls`` with ``fewest`` stacks or more, {}
    without: ``top1_pct``, ``top3_pct``: calls whose fastest stack is forecast as the fastest, or
    among three; ``pairwise_pct``: pairs of a call's stacks in the right order, mean over calls;
    ``slower_pct``: how much longer the stack forecast as fastest takes than the fastest, mean.
    """
    times = pd.DataFrame({"guess": guess, "measured": measured}).groupby([call, stack]).mean()
    scores = []
    for _, of_call in times.groupby(level=0):
        if len(of_call) >= fewest:
            predicted, truth = of_call["guess"].to_numpy(), of_call["measured"].to_numpy()
            order, best = np.argsort(predicted, kind="stable"), truth.argmin()
            right = np.sign(predicted[:, None] - predicted) == np.sign(truth[:, None] - truth)
            pairs = right[np.triu_indices(len(of_call), 1)].mean()
            slower = truth[order[0]] / truth[best] - 1
            scores.append((best == order[0], best in order[:3], pairs, slower))
    if not scores:
        return {}
    means = (100 * np.mean(scores, axis=0)).tolist()
    return {**dict(zip(SOFTWARE, means, strict=True)), "calls": float(len(scores))}


def _by(
    results: Sequence[CaseResult], key: Callable[[CaseResult], Hashable]
) -> dict[Hashable, list[CaseResult]]:
    groups: dict[Hashable, list[CaseResult]] = {}
    for r in results:
        groups.setdefault(key(r), []).append(r)
    return groups
