"""Predicted against measured: one case, and all of them summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from learners.train import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Times in us; ``measured_us`` at the machine's reference speed, ``raw_us`` as clocked.

    ``model`` is what plans that are compared have in common, ``samples`` those of all replicas in
    a step, ``rounds_us`` the first and the last measurement; with one ``retest_ape_pct`` is None.
    """

    case: str
    plan: str
    model: str
    ranks: int
    samples: int
    predicted_us: float
    predicted_us_p10: float
    predicted_us_p90: float
    measured_us: float
    rounds_us: tuple[float, ...]
    raw_us: float
    retest_ape_pct: float | None
    by_family_us: Mapping[str, float]
    unmodelled_frac: float

    @property
    def label(self) -> str:
        """The case and its plan."""
        return f"{self.case} {self.plan}".strip()

    @property
    def retest_text(self) -> str:
        """The noise floor in a table's cell."""
        return "-" if self.retest_ape_pct is None else f"{self.retest_ape_pct:.1f}"

    @property
    def error_pct(self) -> float:
        """Signed error of the forecast."""
        return 100 * (self.predicted_us / self.measured_us - 1)


def grouped(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """Results in one process and under a parallel plan; only what there is."""
    groups = {
        "one process": [r for r in results if not r.plan],
        "under a plan": [r for r in results if r.plan],
    }
    return {name: group for name, group in groups.items() if group}


def in_words(results: Sequence[CaseResult]) -> str:
    """The summary as one line."""
    total = summary(results)
    floor = total.get("noise_floor_pct")
    noise = (
        "everything was measured once"
        if floor is None
        else f"the measurement itself repeats within {floor:.1f} % (median)"
    )
    return (
        f"geometric mean error {total['geomean_ape_pct']:.1f} %, median "
        f"{total['median_ape_pct']:.1f} %, mean {total['mape_pct']:.1f} %, p90 "
        f"{total['p90_ape_pct']:.1f} %, worst {total['worst_ape_pct']:.1f} %; {noise}"
    )


def summary(results: Sequence[CaseResult]) -> dict[str, float]:
    """Absolute errors summed up, beside the median noise floor of what was measured twice.

    ValueError where there are no results.
    """
    if not results:
        raise ValueError("no results to sum up")
    times = np.array([(r.predicted_us, r.measured_us) for r in results])
    twice = [r.retest_ape_pct for r in results if r.retest_ape_pct is not None]
    return {
        "cases": float(len(results)),
        **errors(times[:, 0], times[:, 1]),
        **({"noise_floor_pct": float(np.median(twice))} if twice else {}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """Errors of one part of a line of the public benchmark, by learner."""

    line: str
    part: str
    metric: str
    target: float | None
    known_best: str
    rows: int
    seconds: float
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
