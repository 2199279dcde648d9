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
class Warned:
    """What is wrong with the forecasts of one group of iterations, and the likely cause, in words.

    ``bias_pct`` is the median of the group's signed errors.
    """

    group: str
    gpu: str
    bias_pct: float
    coverage_pct: float
    text: str


def systematic_errors(results: Sequence[CaseResult]) -> list[Warned]:
    """Warnings of groups (kinds of plans, on each GPU) that are off by more than chance.

    Two binomial tests at the level CHANCE: as many errors of one sign, if their median is
    SMALLEST_PCT or more; as few measurements inside intervals of 80 %.
    """
    found = []
    for gpu in sorted({r.gpu for r in results}):
        mine = [r for r in results if r.gpu == gpu]
        for name, group in grouped(mine).items():
            if said := _said(group):
                cause = _cause(group, mine)
                of = f"{name} on {gpu}" if len(mine) < len(results) else name
                errors = [r.error_pct for r in group]
                text = f"{of[0].upper()}{of[1:]}: {said}. {cause}"
                covered = 100 * float(np.mean([r.covered for r in group]))
                bias_pct = float(np.median(errors))
                found.append(
                    Warned(group=name, gpu=gpu, bias_pct=bias_pct, coverage_pct=covered, text=text)
                )
    return found


def _said(group: Sequence[CaseResult]) -> str:
    """What is wrong with a group; empty if nothing is."""
    errors, count = np.array([r.error_pct for r in group]), len(group)
    bias_pct, parts = float(np.median(errors)), []
    same = int(np.sum(np.sign(errors) == np.sign(bias_pct)))
    if abs(bias_pct) >= SMALLEST_PCT and binomtest(same, count).pvalue < CHANCE:
        which = f"all {count}" if same == count else f"{same} of {count}"
        way = "short" if bias_pct < 0 else "long"
        parts.append(f"{which} forecasts are too {way}, by {abs(bias_pct):.0f} % (median)")
    covered = sum(r.covered for r in group)
    if binomtest(covered, count, STATED, alternative="less").pvalue < CHANCE:
        share = f"{covered} of {count} measurements"
        parts.append(f"the intervals of {100 * STATED:.0f} % hold only {share}")
    return "; ".join(parts)


def _cause(group: Sequence[CaseResult], results: Sequence[CaseResult]) -> str:
    """The likely cause of a group's error, one sentence or two."""
    bias_pct = float(np.median([r.error_pct for r in group]))
    floor_pct = summary(group).get(RETEST, 0.0)
    if bias_pct < 0 and floor_pct >= max(-bias_pct, SMALLEST_PCT):
        return (
            f"Likely cause: a machine busy with other work, which only lengthens iterations; "
            f"repeated measurements differ by {floor_pct:.0f} % (median)."
        )
    alone = _alone_pct(group, results)
    if alone is not None and abs(alone) < abs(bias_pct) / 2:
        together = any(r.ranks > 1 for r in group)
        added = "messages, copies, waiting" if together else "sums of gradients, ops done again"
        return (
            f"Likely cause: what the plan adds ({added}), as the same models without it are off "
            f"by {alone:+.0f} % (median)."
        )
    whole = error_parts(group, "", factors(results))
    part = max(whole.correction, key=lambda p: abs(whole.correction[p]))
    return (
        f"Likely cause: {part} ({whole.correction[part]:+.0f} % of the iteration by regression "
        f"over all cases): {CAUSES[part]}."
    )


def _alone_pct(group: Sequence[CaseResult], results: Sequence[CaseResult]) -> float | None:
    """Median signed error in % of the group's models in one process; None for one process."""
    models = {r.model for r in group if r.plan}
    alone = [r.error_pct for r in results if not r.plan and r.model in models]
    return float(np.median(alone)) if alone else None
