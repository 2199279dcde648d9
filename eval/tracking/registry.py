"""The registry of models: one per device and op family, with the alias ``champion``.

A new model becomes the champion if its median error on validation rows is smaller than that of the
current champion by more than the noise. Validation rows are those that both trainings held out.
Whether a shape is held out depends on the shape alone (``frozen_split``), so that neither model has
learned from them.
"""

from __future__ import annotations

import platform
import tempfile
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from itercast.learners.bundle import Bundle
from itercast.learners.held_out import FILE, load_held_out, log_errors, save_held_out
from itercast.learners.models.noise import medians
from itercast.microbench.ops import families

ALIAS = "champion"
LOADER = "itercast.eval.tracking.champion"
BUNDLE = "artifacts/bundle"  # in the folder of a model
REQUIREMENTS, CONDA, PYTHON = "requirements.txt", "conda.yaml", "python_env.yaml"
PINNED = ("mlflow", "xgboost-cpu", "numpy", "scipy", "pandas", "pyarrow", "pyyaml", "torch")
TYPES = {"int": "long", "float": "double", "bool": "boolean", "str": "string"}
FEWEST = 20  # common rows; with fewer two models are not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run and its model."""

    run_id: str
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a model becomes the champion, and why, in words."""

    promote: bool
    reason: str


def judge(new: pd.DataFrame, old: pd.DataFrame | None) -> Verdict:
    """Compare median errors of a new model and of the champion on points that both held out.

    ``itercast.learners.models.noise`` says what the noise of their difference is.
    """
    if old is None:
        return Verdict(promote=True, reason="the first model of this device and family")
    errors = log_errors(new).to_frame("new").join(log_errors(old).rename("old"), how="inner")
    if len(errors) < FEWEST:
        reason = f"only {len(errors)} validation rows in common with the champion, {FEWEST} needed"
        return Verdict(promote=False, reason=reason)
    both = medians(
        {name: errors[name].to_numpy() for name in ("new", "old")},
        np.arange(len(errors)),
        float(new["retest_pct"].median()) if "retest_pct" in new else 0.0,
    )
    low, high = both.interval_pct("new", "old")
    gain, better = both.pct["old"] - both.pct["new"], both.better("new", "old")
    text = f"median error {both.pct['new']:.2f} % on {len(errors)} validation rows, champion "
    text += f"{both.pct['old']:.2f} %: better by {gain:.2f} ({low:.2f} to {high:.2f}), "
    return Verdict(
        promote=better, reason=text + ("more than noise" if better else "no more than noise")
    )


def offer(
    client: Any, run: LoggedRun, device: str, family: str, bundle: Bundle, held_out: pd.DataFrame
) -> None:
    """Register a family's model of a bundle, and make it the champion if ``judge`` says so."""
    name = f"{device}.{family}"
    verdict = judge(held_out, champion_held_out(client, name))
    _save(client, run.model_id, family, bundle, held_out)
    if not client.search_registered_models(f"name = '{name}'"):
        text = f"Times of op family {family} on {device}; `champion` is the one to load."
        client.create_registered_model(name, description=text)
    tags = {"device": device, "family": family, "champion_reason": verdict.reason}
    made = client.create_model_version(
        name,
        f"models:/{run.model_id}",
        run.run_id,
        tags,
        description=verdict.reason,
        model_id=run.model_id,
    )
    client.set_tag(run.run_id, "champion_reason", verdict.reason)
    if verdict.promote:
        client.set_registered_model_alias(name, ALIAS, made.version)
        client.set_tag(run.run_id, "champion", f"yes: version {made.version}")


def champion_held_out(client: Any, name: str) -> pd.DataFrame | None:
    """The held-out forecasts of the champion; None where there is no champion."""
    import mlflow

    found = client.search_registered_models(f"name = '{name}'")
    if not found or ALIAS not in found[0].aliases:
        return None
    champion = client.get_model_version(name, found[0].aliases[ALIAS])
    with tempfile.TemporaryDirectory() as folder:
        place = client.get_logged_model(model_of(champion)).artifact_location
        source = f"{place}/{BUNDLE}/{FILE}"
        path = mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=folder)
        return load_held_out(Path(path).parent)


def model_of(registered: Any) -> str:
    """The id of the logged model that a version in the registry was made from."""
    return str(registered.model_id or registered.source.removeprefix("models:/"))


def _save(client: Any, model_id: str, family: str, whole: Bundle, held_out: pd.DataFrame) -> None:
    """Store a family's part of a bundle as the artifacts of a logged model.

    The folder is written here: ``mlflow.pyfunc.save_model`` reads the metadata of every installed
    package to compare the versions with those that are installed, and these are just that.
    """
    part = Bundle(models={family: whole.models[family]}, gpus=whole.gpus, anchors=whole.anchors)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part.save(folder / BUNDLE)
        save_held_out(folder / BUNDLE, held_out)
        for file, text in environment().items():
            (folder / file).write_text(text)
        described(family).save(folder / "MLmodel")
        client.log_model_artifacts(model_id, name)


def described(family: str) -> Any:
    """MLflow's description of a model: how it is loaded, signature, files of the environment."""
    from mlflow import pyfunc
    from mlflow.models import Model

    facts = {"family": family, "itercast": version("itercast")}
    model = Model(signature=signature(family), metadata=facts)
    files = {"conda_env": CONDA, "python_env": PYTHON}
    pyfunc.add_to_model(model, loader_module=LOADER, data=BUNDLE, **files)
    return model


@cache
def environment() -> dict[str, str]:
    """What pricing imports, as files for pip, virtualenv and conda, at the versions installed.

    itercast itself has to be installed.
    """
    pinned = [f"{name}=={version(name)}" for name in PINNED]
    python, pip = platform.python_version(), f"pip=={version('pip')}"
    conda = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", pip.replace("==", "<="), {"pip": pinned}],
    }
    virtual = {
        "python": python,
        "build_dependencies": [pip],
        "dependencies": [f"-r {REQUIREMENTS}"],
    }
    return {
        REQUIREMENTS: "\n".join(pinned),
        CONDA: yaml.safe_dump(conda, sort_keys=False),
        PYTHON: yaml.safe_dump(virtual, sort_keys=False),
    }


def signature(family: str) -> Any:
    """Inputs: the family's parameters, all but those without default optional; outputs: times."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    inputs: list[Any] = [
        ColSpec(TYPES[str(f.type)], f.name, required=f.default is MISSING)
        for f in fields(families()[family].params)
    ]
    inputs += [ColSpec("string", name, required=False) for name in ("gpu", "stack", "cache")]
    inputs += [ColSpec("double", "threads", required=False)]
    times = ("predicted_us", "predicted_us_p10", "predicted_us_p90")
    outputs: list[Any] = [ColSpec("double", name) for name in times]
    outputs.append(ColSpec("boolean", "in_envelope"))
    return ModelSignature(Schema(inputs), Schema(outputs))
