"""Shares a plan search among workers on many machines: one Optuna study on a database URL.

Every worker lists the same plans in the same order, by the lower bound of their scores. A trial's
number is the index of its plan, and the database gives each number out once. Workers stop where the
next plan cannot be among the best; then they also simulate plans that a killed worker left undone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from itercast.compose.search import Bounded, Scored, Search, SearchResult, bounded_plans

COUNT = 10  # best plans to find


def open_study(
    search: Search, gpus: int, objective: str, url: str, facts: Mapping[str, Any]
) -> tuple[Any, list[Bounded]]:
    """Returns the study that all workers on this search share, and its plans in order."""
    import optuna  # lazy: only shared searches pay for it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    waiting = bounded_plans(search, gpus, objective)
    plans = json.dumps([str(b.plan) for b in waiting])
    digest = hashlib.sha256((json.dumps(dict(facts), sort_keys=True) + plans).encode())
    study = optuna.create_study(
        study_name=f"plan {facts['case']} {gpus} {objective} {digest.hexdigest()[:12]}",
        storage=url,
        load_if_exists=True,
    )
    return study, waiting


def shared_search(
    search: Search, gpus: int, objective: str, url: str, facts: Mapping[str, Any]
) -> SearchResult:
    """Returns the best plans of all workers; ``facts`` name the search and are equal for all."""
    from optuna.trial import TrialState, create_trial  # lazy, as above

    study, waiting = open_study(search, gpus, objective, url, facts)
    simulated = 0
    while not _finished(study, waiting, len(study.get_trials(deepcopy=False))):
        trial = study.ask()
        if trial.number >= len(waiting):
            study.tell(trial, state=TrialState.PRUNED)
            break
        score = search.simulated(waiting[trial.number].rank).score(objective)
        trial.set_user_attr("plan", str(waiting[trial.number].plan))
        study.tell(trial, score)
        simulated += 1
    for number in _undone(study, waiting):
        score = search.simulated(waiting[number].rank).score(objective)
        study.add_trial(create_trial(value=score, user_attrs={"plan": str(waiting[number].plan)}))
        simulated += 1
    best = _best(study, search, waiting)
    return SearchResult(best=best, considered=len(waiting), simulated=simulated)


def _scores(study: Any) -> dict[str, float]:
    """Returns the scores of simulated plans."""
    trials = study.get_trials(deepcopy=False)
    return {t.user_attrs["plan"]: t.value for t in trials if t.state.name == "COMPLETE"}


def _limit(study: Any) -> float:
    """Returns the score of the last of the best plans; infinite while there are too few."""
    scores = sorted(_scores(study).values())
    return scores[COUNT - 1] if len(scores) >= COUNT else float("inf")


def _finished(study: Any, waiting: Sequence[Bounded], number: int) -> bool:
    """Whether no plan from ``number`` on can be among the best."""
    return number >= len(waiting) or waiting[number].lower_bound >= _limit(study)


def _undone(study: Any, waiting: Sequence[Bounded]) -> list[int]:
    """Returns the plans that could be among the best and that no worker has simulated."""
    done, limit = _scores(study), _limit(study)
    return [i for i, b in enumerate(waiting) if b.lower_bound < limit and str(b.plan) not in done]


def _best(study: Any, search: Search, waiting: Sequence[Bounded]) -> list[Scored]:
    """Returns the best of all workers' plans, with their memory."""
    by_text = {str(b.plan): b.rank for b in waiting}
    ranked = sorted(_scores(study).items(), key=lambda item: item[1])[:COUNT]
    return [search.simulated(by_text[text]) for text, _ in ranked]
