"""Prints, saves and logs to MLflow how measured iterations compare with their forecasts."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
from rich.text import Text

from itercast.capture.base.extensions import function_of
from itercast.capture.base.files import write_atomic
from itercast.eval.compare import compared_facts, results_table
from itercast.eval.ranking import choices, ranking_metrics, rankings
from itercast.eval.results import CaseResult, logged_groups, summary, totals
from itercast.eval.systematic import systematic_errors
from itercast.eval.tables import output, print_tables
from itercast.microbench.store import Facts

FILE = "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A comparison: measured iterations, their forecasts, and what these were learned from.

    ``fit``: scores of the op models on held-out shapes by family, as ``TrainReport.to_dict`` makes
    them. ``bundle``: where the models are; empty if not known.
    """

    results: Sequence[CaseResult]
    fit: Facts = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    bundle: str = ""

    def save(self, folder: Path) -> None:
        """Write evaluation.json: the cases, and error summaries of them, of groups and of plans."""
        facts = {
            "cases": [{**asdict(r), "error_pct": r.error_pct} for r in self.results],
            "summary": summary(self.results),
            "groups": {name: summary(group) for name, group in totals(self.results).items()},
            "warnings": [warned.text for warned in systematic_errors(self.results)],
            "plans": {
                **ranking_metrics(self.results),
                "rankings": [asdict(r) for r in rankings(self.results)],
                "choices": [asdict(c) for c in choices(self.results)],
            },
            "machine": dict(self.machine),
            "fit": dict(self.fit),
            "bundle": self.bundle,
        }
        write_atomic(folder / FILE, json.dumps(facts, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Evaluation:
        """Read evaluation.json; ValueError where it is missing or has another form."""
        path = folder / FILE
        try:
            facts = json.loads(path.read_text())
            return cls(
                results=[_case(case) for case in facts["cases"]],
                **{name: facts[name] for name in ("machine", "fit", "bundle")},
            )
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"report {str(path)!r}: no readable comparison ({exc})") from exc


def _case(facts: Facts) -> CaseResult:
    """A case as evaluation.json has it; its ``error_pct`` is no field but a property."""
    values = {name: value for name, value in facts.items() if name != "error_pct"}
    return CaseResult(**{**values, "rounds_us": tuple(values["rounds_us"])})


def machine_of(rows: pd.DataFrame) -> dict[str, str]:
    """Where iterations were measured, and when and where they were compared, in words."""
    today, python = datetime.date.today().isoformat(), platform.python_version()
    return {
        "measured on": ", ".join(sorted(set(rows["gpu"]))),
        "stack": ", ".join(sorted(set(rows["stack"]))),
        "compared": f"{today} by python {python} on {os.cpu_count()} cores",
    }


def report_comparison(
    out: Path,
    results: Sequence[CaseResult],
    rows: pd.DataFrame,
    fit: Facts,
    data: Path | None,
    bundle: Path | None,
    *,
    source: str,
    begin_ms: int,
) -> None:
    """Print the table, write the report to ``out``, and log both to MLflow.

    ``fit``: scores of the op models, empty where none was trained; ``data`` and ``bundle``: the
    dataset they learned from and where they are. ``source``: the command that compared, from
    ``begin_ms`` on.
    """
    if not results:
        raise ValueError("nothing could be forecast")
    from itercast.eval.tracking.logs import log_evaluation
    from itercast.eval.tracking.open_run import attempt

    print_tables(results_table(results))
    warnings = systematic_errors(results)
    for warned in warnings:
        output().print(Text("warning", "red") + f": {warned.text}", highlight=False)
    Evaluation(results=results, fit=fit, machine=machine_of(rows), bundle=str(bundle or "")).save(
        out
    )
    page = function_of("pages", "comparison")(out)
    groups = logged_groups(results, {(w.gpu, w.group): w.text for w in warnings})
    facts = compared_facts(rows, data, bundle, source)
    output().print(f"report: {page}")
    metrics = ranking_metrics(results)
    if attempt(log_evaluation, out.name, groups, facts, metrics, out, begin_ms):
        output().print("logged to MLflow; `itercast ui` shows it")
