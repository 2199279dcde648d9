"""Log the hyperparameter trials of a family as child runs."""

from __future__ import annotations

from typing import Any

from itercast.eval.tracking.store import now_ms
from itercast.learners.models.trees import open_study
from itercast.learners.train import journal_of


def log_trials(client: Any, experiment: str, parent: str, family: str, digest: str) -> None:
    """Log each finished Optuna trial as a child of run ``parent``; without trials do nothing.

    ``digest`` is that of the rows the trials were scored on
    (``itercast.learners.train.journal_of``).
    """
    journal = journal_of(family, digest)
    if not journal.is_file():
        return
    from mlflow.entities import Metric, Param

    study = open_study(str(journal), family)
    for trial in study.get_trials(deepcopy=False):
        if trial.value is None:
            continue
        tags = {"mlflow.parentRunId": parent, "family": family, "trial": str(trial.number)}
        name = f"{family} · trial {trial.number}"
        run = client.create_run(experiment, start_time=now_ms(), tags=tags, run_name=name)
        error_pct = round(100 * trial.value, 2)
        client.log_batch(
            run.info.run_id,
            metrics=[Metric("mean_log_error_pct", error_pct, now_ms(), 0)],
            params=[Param(k, f"{v:.4g}") for k, v in trial.params.items()],
        )
        client.set_terminated(run.info.run_id)
