"""The registry of models: one per device and op family, with the alias ``champion``.

A new model becomes the champion if its median error on validation rows is smaller than that of the
current champion by more than the noise. Validation rows are those that both trainings held out.
Whether a shape is held out depends on the shape alone (``frozen_split``), so that neither model has
learned from them.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from itercast.learners.bundle import Bundle
from itercast.learners.held_out import (
    FILE,
    load_held_out,
    log_errors,
    median_retest_pct,
    save_held_out,
    shapes_of,
)
from itercast.learners.models import noise
from itercast.learners.models.noise import medians
from itercast.microbench.ops import families
from itercast.microbench.ops.family import parameter_types

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, TensorSpec

ALIAS = "champion"
LOADER = "itercast.eval.tracking.champion"
PINNED = ("mlflow", "xgboost-cpu", "numpy", "scipy", "pandas", "pyarrow", "pyyaml", "torch")
TYPES = {int: "long", float: "double", bool: "boolean", str: "string"}
FEWEST = 20  # common rows; with fewer two models are not compared
FIRST, BETTER, WORSE = "first", "better", "worse"
SAME, TOO_FEW = "no difference beyond the noise", "too few rows"
WORDS = (FIRST, BETTER, WORSE, SAME, TOO_FEW)  # of verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run and its model."""

    run_id: str
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a new model is better than the champion, on ``points`` rows that both held out.

    ``word`` is one of WORDS. ``pct``: median errors in % of the new model and of the champion;
    ``gain_pct``: 95 % interval, lower and upper end, of the champion's error minus the new one's.
    """

    word: str
    points: int = 0
    pct: tuple[float, float] = (0.0, 0.0)
    gain_pct: tuple[float, float] = (0.0, 0.0)

    @property
    def promote(self) -> bool:
        """Whether the new model becomes the champion."""
        return self.word in (FIRST, BETTER)

    @property
    def reason(self) -> str:
        """The verdict in words, with the numbers it rests on."""
        if self.word == FIRST:
            return "the first model of this device and family"
        if self.word == TOO_FEW:
            needed = f"{FEWEST} of {noise.FEWEST} shapes are needed to compare"
            return f"{self.points} rows held out by both, {needed}"
        (new, old), (low, high) = self.pct, self.gain_pct
        return (
            f"{self.word}: median error {new:.2f} %, champion {old:.2f} %, on {self.points} rows "
            f"held out by both; champion minus this one {low:+.2f} to {high:+.2f} (95 %)"
        )


def judge(new: pd.DataFrame, old: pd.DataFrame | None) -> Verdict:
    """Compare median errors of a new model and of the champion on rows that both held out.

    ``new``, ``old``: held-out forecasts of both; ``old`` is None where there is no champion.
    ``itercast.learners.models.noise`` says what the noise of their difference is.
    """
    if old is None:
        return Verdict(word=FIRST)
    errors = log_errors(new).to_frame("new").join(log_errors(old).rename("old"), how="inner")
    if len(errors) < FEWEST:
        return Verdict(word=TOO_FEW, points=len(errors))
    both = medians(
        {name: errors[name].to_numpy() for name in ("new", "old")},
        shapes_of(errors),
        median_retest_pct(new, old),
    )
    if (gain_pct := both.interval_pct("new", "old")) is None:
        return Verdict(word=TOO_FEW, points=len(errors))
    word = BETTER if both.better("new", "old") else WORSE if both.better("old", "new") else SAME
    return Verdict(
        word=word, points=len(errors), pct=(both.pct["new"], both.pct["old"]), gain_pct=gain_pct
    )


def offer(
    client: MlflowClient,
    run: LoggedRun,
    device: str,
    family: str,
    bundle: Bundle,
    held_out: pd.DataFrame,
) -> Verdict:
    """Register a family's model of a bundle, and make it the champion if ``judge`` says so."""
    name = f"{device}.{family}"
    verdict = judge(held_out, champion_held_out(client, name))
    _save(client, run.model_id, family, bundle, held_out)
    if not client.search_registered_models(f"name = '{name}'"):
        text = f"Times of op family {family} on {device}; `champion` is the one to load."
        client.create_registered_model(name, description=text)
    before = champion_of(client, name)
    tags = {"device": device, "family": family, "champion_reason": verdict.reason}
    made = client.create_model_version(
        name,
        f"models:/{run.model_id}",
        run.run_id,
        tags,
        description=verdict.reason,
        model_id=run.model_id,
    )
    run_tags = {"verdict": verdict.word, "champion_reason": verdict.reason, "version": made.version}
    if before:
        run_tags |= {"champion_version": before.version}
    if verdict.points >= FEWEST:
        run_tags |= {"champion_pct": f"{verdict.pct[1]:.2f}"}
    for key, value in run_tags.items():
        client.set_tag(run.run_id, key, str(value))
    if verdict.promote:
        client.set_registered_model_alias(name, ALIAS, made.version)
        client.set_tag(run.run_id, "champion", f"yes: version {made.version}")
    return verdict


def champion_held_out(client: MlflowClient, name: str) -> pd.DataFrame | None:
    """The held-out forecasts of the champion; None where there is no champion."""
    import mlflow
    from mlflow.models import Model

    champion = champion_of(client, name)
    if champion is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(champion)
        bundle = Model.load(f"models:/{model}").flavors["python_function"]["data"]
        source = f"{client.get_logged_model(model).artifact_location}/{bundle}/{FILE}"
        path = mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=folder)
        return load_held_out(Path(path).parent)


def champion_of(client: MlflowClient, name: str) -> ModelVersion | None:
    """The version of a registered model that is its champion; None where there is none."""
    models = client.search_registered_models(f"name = '{name}'")
    if not models or ALIAS not in models[0].aliases:
        return None
    return client.get_model_version(name, models[0].aliases[ALIAS])


def model_of(registered: ModelVersion) -> str:
    """The id of the logged model that a version in the registry was made from."""
    return str(registered.model_id or str(registered.source).removeprefix("models:/"))


def _save(
    client: MlflowClient, model_id: str, family: str, whole: Bundle, held_out: pd.DataFrame
) -> None:
    """Store a family's part of a bundle as a logged model; itercast has to be installed to load it.

    Its environment pins what pricing imports, at the versions installed.
    """
    from mlflow import pyfunc

    part = Bundle(models={family: whole.models[family]}, gpus=whole.gpus, anchors=whole.anchors)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow asks for an example of the input
        bundle, model = Path(name) / "bundle", Path(name) / "model"
        part.save(bundle)
        save_held_out(bundle, held_out)
        pyfunc.save_model(
            str(model),
            loader_module=LOADER,
            data_path=str(bundle),
            pip_requirements=[f"{package}=={version(package)}" for package in PINNED],
            signature=signature(family),
            metadata={"family": family, "itercast": version("itercast")},
        )
        client.log_model_artifacts(model_id, str(model))


def signature(family: str) -> ModelSignature:
    """Columns of a family's model in MLflow: in, its parameters and the row's facts; out, times.

    Parameters with a default are optional.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    params = families()[family].params
    types = parameter_types(params)
    inputs: list[ColSpec | TensorSpec] = [
        ColSpec(TYPES[types[f.name]], f.name, required=f.default is MISSING) for f in fields(params)
    ]
    inputs += [ColSpec("string", name, required=False) for name in ("gpu", "stack", "cache")]
    inputs += [ColSpec("double", "threads", required=False)]
    times = ("predicted_us", "predicted_us_p10", "predicted_us_p90")
    outputs: list[ColSpec | TensorSpec] = [ColSpec("double", name) for name in times]
    outputs.append(ColSpec("boolean", "in_envelope"))
    return ModelSignature(Schema(inputs), Schema(outputs))
