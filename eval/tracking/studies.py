"""Log the hyperparameter trials of a family as child runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from itercast.eval.tracking.store import now_ms
from itercast.microbench.store import Facts


def log_trials(
    client: Any, experiment: str, parent: str, family: str, trials: Sequence[Facts]
) -> None:
    """Log each finished Optuna trial as a child of run ``parent``.

    ``trials``: see ``itercast.learners.models.trees.Tuned``.
    """
    from mlflow.entities import Metric, Param

    for trial in trials:
        number = trial["number"]
        tags = {"mlflow.parentRunId": parent, "family": family, "trial": str(number)}
        name = f"{family} · trial {number}"
        run = client.create_run(experiment, start_time=now_ms(), tags=tags, run_name=name)
        error_pct = round(100 * trial["value"], 2)
        client.log_batch(
            run.info.run_id,
            metrics=[Metric("mean_log_error_pct", error_pct, now_ms(), 0)],
            params=[Param(k, f"{v:.4g}") for k, v in trial["params"].items()],
        )
        client.set_terminated(run.info.run_id)
