"""Finds groups of iterations whose forecasts are all too short, too long, or too sure, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from itercast.eval.error_parts import error_parts, factors
from itercast.eval.intervals import STATED
from itercast.eval.results import RETEST, CaseResult, grouped, summary

CHANCE = 0.05  # what happens by chance more often than this is no warning
SMALLEST_PCT = 5.0  # a smaller error changes no decision
CAUSES = {
    "kernels": "ops take another time in a whole step than alone",
    "host": "the host is another one, or is busier than when its calls were timed",
    "communication": "messages take another time beside a backward than alone",
    "synchronisation": "ranks wait for each other for another time than simulated",
    "assumed": "assumed numbers, which `predict --explain-assumptions` lists",
    "uncovered": "ops without a learned model, which `itercast collect` would measure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWarning:
    """``text``: what is wrong with the forecasts of a group of iterations, and the likely cause.

    ``group``: a kind of plan. ``bias_pct``: the median of its signed errors.
    """

    group: str
    gpu: str
    bias_pct: float
    coverage_pct: float
    text: str


def systematic_errors(results: Sequence[CaseResult]) -> list[GroupWarning]:
    """Warnings of groups (kinds of plans, on each GPU) that are off by more than chance.

    Two binomial tests at the level CHANCE: are more errors of one sign than of a fair coin (if
    their median is SMALLEST_PCT or more), and do fewer 80 % intervals than 80 % cover?
    """
    warnings = []
    for gpu in sorted({r.gpu for r in results}):
        on_gpu = [r for r in results if r.gpu == gpu]
        for name, group in grouped(on_gpu).items():
            if problem := _problem(group):
                subject = f"{name} on {gpu}" if len(on_gpu) < len(results) else name
                cause = _cause(group, on_gpu)
                warnings.append(
                    GroupWarning(
                        group=name,
                        gpu=gpu,
                        bias_pct=float(np.median([r.error_pct for r in group])),
                        coverage_pct=100 * float(np.mean([r.covered for r in group])),
                        text=f"{subject[0].upper()}{subject[1:]}: {problem}. {cause}",
                    )
                )
    return warnings


def _problem(group: Sequence[CaseResult]) -> str:
    """What is wrong with a group's forecasts, in words; empty if nothing is."""
    errors, count = np.array([r.error_pct for r in group]), len(group)
    bias_pct, problems = float(np.median(errors)), []
    same_sign = int(np.sum(np.sign(errors) == np.sign(bias_pct)))
    if abs(bias_pct) >= SMALLEST_PCT and binomtest(same_sign, count).pvalue < CHANCE:
        which = f"all {count}" if same_sign == count else f"{same_sign} of {count}"
        way = "short" if bias_pct < 0 else "long"
        problems.append(f"{which} forecasts are too {way}, by {abs(bias_pct):.0f} % (median)")
    covered = sum(r.covered for r in group)
    if binomtest(covered, count, STATED, alternative="less").pvalue < CHANCE:
        share = f"{covered} of {count} measurements"
        problems.append(f"the intervals of {100 * STATED:.0f} % hold only {share}")
    return "; ".join(problems)


def _cause(group: Sequence[CaseResult], results: Sequence[CaseResult]) -> str:
    """The likely cause of a group's error, in words; ``results``: all iterations on its GPU.

    Tried in turn: noise of measuring, what the plan adds to one process, a part of the forecast.
    """
    bias_pct = float(np.median([r.error_pct for r in group]))
    floor_pct = summary(group).get(RETEST, 0.0)
    if bias_pct < 0 and floor_pct >= max(-bias_pct, SMALLEST_PCT):
        return (
            f"Likely cause: a machine busy with other work, which only lengthens iterations; "
            f"repeated measurements differ by {floor_pct:.0f} % (median)."
        )
    alone_pct = _alone_pct(group, results)
    if alone_pct is not None and abs(alone_pct) < abs(bias_pct) / 2:
        ranks = max(r.ranks for r in group)
        added = "messages, copies, waiting" if ranks > 1 else "sums of gradients, ops done again"
        return (
            f"Likely cause: what the plan adds ({added}), as the same models without it are off "
            f"by {alone_pct:+.0f} % (median)."
        )
    correction_pct = error_parts(group, "", factors(results)).correction
    part = max(correction_pct, key=lambda name: abs(correction_pct[name]))
    return (
        f"Likely cause: {part} ({correction_pct[part]:+.0f} % of the iteration by regression "
        f"over all cases): {CAUSES[part]}."
    )


def _alone_pct(group: Sequence[CaseResult], results: Sequence[CaseResult]) -> float | None:
    """Median signed error in % of the same models without a plan; None if none was measured so."""
    models = {r.model for r in group if r.plan}
    alone = [r.error_pct for r in results if not r.plan and r.model in models]
    return float(np.median(alone)) if alone else None
