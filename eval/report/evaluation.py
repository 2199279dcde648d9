"""A comparison on disk: evaluation.json with cases, error summaries and where they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.eval.errors.systematic import systematic_errors
from itercast.eval.ranking import choices, ranking_metrics, rankings
from itercast.eval.results import CaseResult, summary, totals
from itercast.microbench.store import Facts

FILE = "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Measured iterations beside their forecasts, and what the forecasts were learned from.

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
    """A case of evaluation.json, of which ``error_pct`` is derived."""
    named = {k: v for k, v in facts.items() if k != "error_pct"}
    return CaseResult(**{**named, "rounds_us": tuple(named["rounds_us"])})


def machine_of(rows: pd.DataFrame) -> dict[str, str]:
    """Where iterations were measured, and when and where they were compared, in words."""
    today, python = datetime.date.today().isoformat(), platform.python_version()
    return {
        "measured on": ", ".join(sorted(set(rows["gpu"]))),
        "stack": ", ".join(sorted(set(rows["stack"]))),
        "compared": f"{today} by python {python} on {os.cpu_count()} cores",
    }
