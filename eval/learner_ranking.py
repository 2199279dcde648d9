"""Ranks learners per op family and on whole iterations that are composed of their op prices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from itercast.eval.compare import compare_all, console
from itercast.eval.learner_table import Scores, add_line, empty_table
from itercast.eval.results import CaseResult, summary
from itercast.eval.tracking.logs import log_evaluation
from itercast.learners.beyond_memory import usable_rows
from itercast.learners.bundle import Bundle
from itercast.learners.compare import learner_models
from itercast.learners.family_model import FamilyModel, prepare
from itercast.learners.features.machine_speed import learn_speed, undisturbed
from itercast.learners.models.compared import BLEND, NAMES
from itercast.learners.models.noise import medians
from itercast.learners.train import SCORES, hardware_of
from itercast.microbench.ops import families
from itercast.microbench.store import Facts

END_TO_END = "whole iterations"
ByFamily = Mapping[str, Scores]  # of learners


def learner_bundles(bundle: Bundle, data: Path) -> dict[str, Bundle]:
    """By learner, a copy of the bundle in which this learner prices ops instead of the ensemble.

    It is fitted to the rows of ``data``; families without rows there keep the ensemble.
    """
    found: dict[str, dict[str, FamilyModel]] = {n: dict(bundle.models) for n in NAMES if n != BLEND}
    wanted = [name for name in bundle.models if (data / name).is_dir()]
    for name, rows in usable_rows([data], wanted).items():
        rows, family = undisturbed(rows, bundle.anchors), families()[name]
        speed = learn_speed(rows, family, bundle.anchors)
        prepared = prepare(rows, family, hardware_of([data], rows), speed)
        for learner, model in learner_models(bundle.models[name], prepared).items():
            found[learner][name] = model
    return {name: replace(bundle, models=models) for name, models in found.items()}


def rank_learners(
    rows: pd.DataFrame, results: Sequence[CaseResult], folder: Path, data: Path, out: Path
) -> None:
    """Print the ranking, and log the iterations of each learner to MLflow, as the report ``out``.

    ``results``: measured iterations ``rows`` as the bundle in ``folder`` forecasts them.
    """
    found = {BLEND: list(results)}
    for name, bundle in learner_bundles(Bundle.load(folder), data).items():
        found[name] = compare_all(rows, folder, bundle)
    scores = {**family_scores(folder), END_TO_END: iteration_scores(found)}
    console.print(ranking_table(scores))
    device = ", ".join(sorted(set(rows["gpu"])))
    for name, some in found.items():
        if name != BLEND:
            errors_pct = {r.label: r.error_pct for r in some}
            log_evaluation(f"{out.name} · {name}", device, summary(some), errors_pct, out, name)


def family_scores(folder: Path) -> dict[str, Scores]:
    """Errors and ranks on held-out shapes, as the training of a bundle left them."""
    path = folder / SCORES
    report: Facts = json.loads(path.read_text()) if path.is_file() else {}
    return {family: entry["learners"] for family, entry in sorted(report.items())}


def iteration_scores(found: Mapping[str, Sequence[CaseResult]]) -> Scores:
    """Median errors in % and ranks of learners on the iterations that all of them forecast."""
    errors = pd.DataFrame(
        {
            name: {(r.gpu, r.model, r.plan): log(r.measured_us / r.predicted_us) for r in some}
            for name, some in found.items()
        }
    ).dropna()
    retest = summary(found[BLEND]).get("noise_floor_pct")
    logs = {name: errors[name].to_numpy() for name in found}
    both = medians(logs, np.arange(len(errors)), retest)
    ranks = both.ranks()
    return {name: {"median_ape_pct": both.pct[name], "rank": ranks[name]} for name in found}


def ranking_table(scores: ByFamily) -> Table:
    """A line per family and one of whole iterations, a column per learner."""
    title = "median absolute error, %: unseen shapes, whole iterations"
    table = empty_table(f"{title}; bold: none is better beyond the noise", ())
    for family, some in scores.items():
        add_line(table, family, (), some)
    return table
