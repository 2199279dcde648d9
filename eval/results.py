"""Results of comparisons: one measured iteration, one line of the public benchmark, summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from itercast.capture.plan import ParallelPlan
from itercast.compose.programs.measured_script import ITS_OWN
from itercast.eval.tracking.logs import Group
from itercast.learners.train import errors
from itercast.microbench.store import Row

COVERAGE = "coverage_pct"  # share of measured iterations that their 80 % intervals cover
ITERATIONS = "whole iterations"  # a line of tables by op family
RETEST = "noise_floor_pct"  # median difference of two measurements of the same
ONE_PROCESS, SCRIPT = "one process", "scripts"
KINDS = (  # of plans, as ``kind_of`` tells them apart
    ONE_PROCESS,
    SCRIPT,
    "one process with a plan",
    "DDP",
    "ZeRO and FSDP",
    "tensor parallel",
    "context parallel",
    "pipeline",
    "several axes",
)
LOGGED = (  # of a case, in MLflow
    *("case", "plan", "predicted_us", "predicted_us_p10", "predicted_us_p90", "measured_us"),
    *("error_pct", "retest_ape_pct", "unmodelled_frac", "assumed_frac"),
)
COLUMNS = {  # of error tables
    "median": "median_ape_pct",
    "mean": "mape_pct",
    "p90": "p90_ape_pct",
    "worst": "worst_ape_pct",
    "bias": "bias_pct",
    "geomean": "geomean_ape_pct",
    "retest": RETEST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One measured iteration beside its forecast; times in us.

    ``measured_us`` is scaled to the machine's reference speed. ``model`` names case and settings,
    without the plan. ``samples`` counts all replicas of a step. ``rounds_us`` are the medians
    of the first and of the second half of all measurements; with one, ``retest_ape_pct`` is None.
    ``parts_us``: the forecast by ``itercast.eval.iteration_parts.PARTS``. ``source``: the file of
    measured steps that has it.
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
    retest_ape_pct: float | None
    by_family_us: Mapping[str, float]
    unmodelled_frac: float
    gpu: str = ""
    parts_us: Mapping[str, float] = field(default_factory=dict)
    assumed_frac: float = 0.0
    source: str = ""

    @property
    def name(self) -> str:
        """The case, with what tells it from other rows of it: GPU, dtype, engine."""
        return self.case if self.source else self.model

    @property
    def label(self) -> str:
        """The names of the case and its plan."""
        return f"{self.name} {self.plan}".strip()

    @property
    def retest_text(self) -> str:
        """The retest error as text for a table; a dash where it was measured once."""
        return "-" if self.retest_ape_pct is None else f"{self.retest_ape_pct:.1f}"

    @property
    def cells(self) -> list[str]:
        """Texts of a table's row: predicted ms, measured ms, error, retest error, unmodelled %."""
        times = [f"{us / 1e3:.2f}" for us in (self.predicted_us, self.measured_us)]
        no_model = f"{100 * self.unmodelled_frac:.1f}"
        return [*times, f"{self.error_pct:+.1f}", self.retest_text, no_model]

    @property
    def covered(self) -> bool:
        """Whether the measured time is within the forecast's 80 % interval."""
        return self.predicted_us_p10 <= self.measured_us <= self.predicted_us_p90

    @property
    def error_pct(self) -> float:
        """Signed error of the forecast in %."""
        return 100 * (self.predicted_us / self.measured_us - 1)


def records(rows: pd.DataFrame) -> list[Row]:
    """Rows as mappings by column."""
    return [{str(k): v for k, v in row.items()} for row in rows.to_dict("records")]


def grouped(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """Results by kind of plan, in the order of KINDS; empty groups are left out."""
    groups: dict[str, list[CaseResult]] = {name: [] for name in KINDS}
    for r in results:
        groups[kind_of(r.plan)].append(r)
    return {name: group for name, group in groups.items() if group}


def kind_of(plan: str) -> str:
    """The kind of a plan, one of KINDS: which ways of splitting a step it uses."""
    if plan in ("", ITS_OWN):
        return SCRIPT if plan else ONE_PROCESS
    parsed = ParallelPlan.parse(plan)
    replicas = "ZeRO and FSDP" if parsed.zero else "DDP"
    axes = {"dp": replicas, "tp": "tensor parallel", "pp": "pipeline", "cp": "context parallel"}
    used = [kind for axis, kind in axes.items() if getattr(parsed, axis) > 1]
    if not used:
        return "one process with a plan"
    return used[0] if len(used) == 1 else "several axes"


def totals(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """Results ``grouped`` by kind of plan, and "all plans" together where there are several kinds.

    Results of several GPUs are grouped for each; a group's name then ends with "on <gpu>".
    """
    gpus = sorted({r.gpu for r in results})
    if len(gpus) > 1:
        by_gpu = {gpu: totals([r for r in results if r.gpu == gpu]) for gpu in gpus}
        return {f"{name} on {gpu}": group for gpu in gpus for name, group in by_gpu[gpu].items()}
    groups = grouped(results)
    if len(groups.keys() - {ONE_PROCESS}) > 1:
        groups["all plans"] = [r for r in results if r.plan]
    return groups


def by_source(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """Results by the file of measured steps that has them."""
    sources = dict.fromkeys(r.source for r in results)
    return {source: [r for r in results if r.source == source] for source in sources}


def over_sources(groups: Mapping[str, Sequence[CaseResult]]) -> str:
    """The mean over sources of their mean errors, biases and coverage."""
    table = pd.DataFrame([summary(group) for group in groups.values()])
    error, bias, covered = table[["mape_pct", "bias_pct", COVERAGE]].mean()
    return (
        f"mean over {len(groups)} sources: error {error:.1f} %, bias {bias:+.1f}; "
        f"80 % intervals cover {covered:.0f} %"
    )


def in_words(results: Sequence[CaseResult]) -> str:
    """The summary of results as a sentence."""
    total = summary(results)
    floor = total.get(RETEST)
    noise = (
        "nothing was measured twice"
        if floor is None
        else f"repeated measurements differ by {floor:.1f} % (median)"
    )
    return (
        f"geometric mean error {total['geomean_ape_pct']:.1f} %, median "
        f"{total['median_ape_pct']:.1f} %, mean {total['mape_pct']:.1f} %, p90 "
        f"{total['p90_ape_pct']:.1f} %, worst {total['worst_ape_pct']:.1f} %, bias "
        f"{total['bias_pct']:+.1f}; {noise}; "
        f"80 % intervals cover {total[COVERAGE]:.0f} %"
    )


def summary(results: Sequence[CaseResult]) -> dict[str, float]:
    """Error statistics of results, the share that their 80 % intervals cover, and the noise floor.

    The noise floor is the median retest error of those measured twice.

    ValueError where there are no results.
    """
    if not results:
        raise ValueError("no results to sum up")
    times = np.array([(r.predicted_us, r.measured_us) for r in results])
    twice = [r.retest_ape_pct for r in results if r.retest_ape_pct is not None]
    return {
        "cases": float(len(results)),
        **errors(times[:, 0], times[:, 1]),
        COVERAGE: 100 * float(np.mean([r.covered for r in results])),
        **({RETEST: float(np.median(twice))} if twice else {}),
    }


def logged_groups(
    results: Sequence[CaseResult], warnings: Mapping[tuple[str, str], str]
) -> list[Group]:
    """Results by GPU and kind of plan, with scores and single cases, as runs of MLflow show them.

    ``warnings``: text by GPU and kind.
    """
    groups = []
    for gpu in sorted({r.gpu for r in results}):
        for kind, group in grouped([r for r in results if r.gpu == gpu]).items():
            cases = pd.DataFrame([{n: getattr(r, n) for n in LOGGED} for r in group])
            warning = warnings.get((gpu, kind), "")
            groups.append(
                Group(kind=kind, gpu=gpu, metrics=summary(group), cases=cases, warning=warning)
            )
    return groups
