"""Ranks learners per op family and on whole iterations that are composed of their op prices.

Tables have a narrow column per learner, for terminals of 80 columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from itercast.eval.compare import compare_all, compared_facts, console
from itercast.eval.results import ITERATIONS, CaseResult, log_errors, logged_groups
from itercast.eval.tracking.attempt import attempt
from itercast.eval.tracking.logs import log_evaluation
from itercast.eval.tracking.store import now_ms
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

HEADS = {  # in two lines, so that all columns fit; other names stand as they are
    "xgboost-physics": "xgb\nphysics",
    "tile-mlp": "tile\nmlp",
    "nearest": "near-\nest",
    "roofline": "roof-\nline",
}
WHOLE_PCT = 99.95  # from here on without decimals
BEST_RANK = 1  # of all learners whose errors differ from the smallest by no more than the noise
Scores = Mapping[str, Mapping[str, float]]  # by learner: errors in % and ``rank``


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
    begin_ms: dict[str, int] = {}
    for name, bundle in learner_bundles(Bundle.load(folder), data).items():
        begin_ms[name] = now_ms()
        found[name] = compare_all(rows, folder, bundle)
    scores = {**family_scores(folder), ITERATIONS: iteration_scores(found)}
    lines = [(family, (), some) for family, some in scores.items()]
    console.print(learner_table("unseen shapes and whole iterations", lines))
    for name, some in found.items():
        if name != BLEND:
            facts = compared_facts(rows, data, folder, "itercast evaluate --learners", name)
            title, groups = f"{out.name} · {name}", logged_groups(some)
            attempt(log_evaluation, title, groups, facts, {}, out, begin_ms[name])


def family_scores(folder: Path) -> dict[str, Scores]:
    """Errors and ranks on held-out shapes, as the training of a bundle left them."""
    path = folder / SCORES
    report: Facts = json.loads(path.read_text()) if path.is_file() else {}
    return {family: entry["learners"] for family, entry in sorted(report.items())}


def iteration_scores(found: Mapping[str, Sequence[CaseResult]]) -> Scores:
    """Median errors in % and ranks of learners on the iterations that all of them forecast."""
    errors, retest = log_errors({BLEND: found[BLEND], **found})
    logs = {name: errors[name].to_numpy() for name in found}
    both = medians(logs, np.arange(len(errors)), retest)
    ranks = both.ranks()
    return {name: {"median_ape_pct": both.pct[name], "rank": ranks[name]} for name in found}


def learner_table(
    title: str,
    lines: Sequence[tuple[str, Sequence[str], Scores]],
    facts: Sequence[str] = (),
) -> Table:
    """A line per family with its facts and errors in %, and a column per learner, the blend first.

    Bold are the learners that no other is better than beyond the noise: one, or several that tie.
    """
    learners = [n for n in reversed(NAMES) if any(n in scores for _, _, scores in lines)]
    title = f"median absolute error on {title}, %; bold: none is better beyond the noise"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("family", no_wrap=True)
    for head in (*facts, *(HEADS.get(name, name) for name in learners)):
        table.add_column(head, justify="right", no_wrap=True)
    for family, own, scores in lines:
        table.add_row(family, *own, *(cell(scores.get(name)) for name in learners))
    return table


def cell(score: Mapping[str, float] | None) -> str:
    """A learner's median error in three digits or more (8.8, 51.3, 313), bold if none is better."""
    if score is None:
        return "-"
    pct = score["median_ape_pct"]
    text = f"{pct:.0f}" if pct >= WHOLE_PCT else f"{pct:.1f}"
    return f"[bold]{text}[/]" if score.get("rank") == BEST_RANK else text
