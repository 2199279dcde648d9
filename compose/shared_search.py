"""A plan search shared by workers on many machines: one Optuna study on a database URL.

Every worker lists the same plans in the same order, by the least they can score. A trial's number
is the plan it stands for, and the database gives each number out once. Workers stop where the next
plan cannot be among the best, and what a killed worker left undone another one does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from compose.search import Bounded, Found, Scored, Search, bounded_plans

COUNT = 10


def open_study(
    search: Search, gpus: int, objective: str, url: str, facts: Mapping[str, Any]
) -> tuple[Any, list[Bounded]]:
    """The study that all workers on this search share, and its plans in order."""
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
) -> Found:
    """The best plans of all workers; ``facts`` name the search, equal for all that share it."""
    from optuna.trial import TrialState, create_trial  # lazy, as above

    study, waiting = open_study(search, gpus, objective, url, facts)
    simulated = 0
    while not _settled(study, waiting, len(study.get_trials(deepcopy=False))):
        trial = study.ask()
        if trial.number >= len(waiting):
            study.tell(trial, state=TrialState.PRUNED)
            break
        score = search.simulated(waiting[trial.number].rank).score(objective)
        trial.set_user_attr("plan", str(waiting[trial.number].plan))
        study.tell(trial, score)
        simulated += 1
    for number in _left(study, waiting):
        score = search.simulated(waiting[number].rank).score(objective)
        study.add_trial(create_trial(value=score, user_attrs={"plan": str(waiting[number].plan)}))
        simulated += 1
    return Found(best=_best(study, search, waiting), considered=len(waiting), simulated=simulated)


def _scores(study: Any) -> dict[str, float]:
    """Finished plans."""
    trials = study.get_trials(deepcopy=False)
    return {t.user_attrs["plan"]: t.value for t in trials if t.state.name == "COMPLETE"}


def _limit(study: Any) -> float:
    """Score of the last of the best; infinite while there are too few."""
    scores = sorted(_scores(study).values())
    return scores[COUNT - 1] if len(scores) >= COUNT else float("inf")


def _settled(study: Any, waiting: Sequence[Bounded], number: int) -> bool:
    """Whether plans from ``number`` on cannot be among the best."""
    return number >= len(waiting) or waiting[number].least >= _limit(study)


def _left(study: Any, waiting: Sequence[Bounded]) -> list[int]:
    """Plans that could be among the best and that nobody finished."""
    done, limit = _scores(study), _limit(study)
    return [i for i, b in enumerate(waiting) if b.least < limit and str(b.plan) not in done]


def _best(study: Any, search: Search, waiting: Sequence[Bounded]) -> list[Scored]:
    """The best of all workers' plans, with their memory."""
    by_text = {str(b.plan): b.rank for b in waiting}
    ranked = sorted(_scores(study).items(), key=lambda item: item[1])[:COUNT]
    return [search.simulated(by_text[text]) for text, _ in ranked]
