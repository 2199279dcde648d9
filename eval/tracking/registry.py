"""The registry of models: one per device and op family, with the alias ``champion``.

A new model becomes the champion if it forecasts the frozen validation rows better than the old one
by more than the noise. These are held-out rows of both trainings: a shape is held out or not
whatever other rows there are, so neither has learned from them.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from learners.bundle import Bundle
from learners.held_out import FILE, load_held_out, save_held_out
from microbench.ops import families

ALIAS = "champion"
CODE = Path(__file__).with_name("champion.py")
PINNED = ("xgboost-cpu", "numpy", "scipy", "pandas", "pyarrow", "pyyaml", "torch")
TYPES = {"int": "long", "float": "double", "bool": "boolean", "str": "string"}
FEWEST = 20  # common rows; with fewer two models are not compared
RESAMPLES, NOISE_SIGMAS = 200, 2.0


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
    """Compare the held-out forecasts of a new model with those of the champion.

    By the median error of the rows that both held out. The noise is NOISE_SIGMAS standard
    deviations of the difference when rows are drawn again.
    """
    if old is None:
        return Verdict(promote=True, reason="the first model of this device and family")
    both = _by_point(new).to_frame("new").join(_by_point(old).rename("old"), how="inner")
    if len(both) < FEWEST:
        reason = f"only {len(both)} validation rows in common with the champion, {FEWEST} needed"
        return Verdict(promote=False, reason=reason)
    errors = both.to_numpy()
    drawn = np.random.default_rng(0).integers(0, len(errors), (RESAMPLES, len(errors)))
    medians = np.median(errors[drawn], axis=1)
    noise = NOISE_SIGMAS * float(np.std(medians[:, 1] - medians[:, 0]))
    first, second = np.median(errors, axis=0)
    gain = float(second - first)
    text = f"median error {first:.2f} % on {len(both)} validation rows, champion {second:.2f} %"
    kind = "more" if gain > noise else "no more"
    return Verdict(
        promote=gain > noise, reason=f"{text}: better by {gain:.2f}, {kind} than noise {noise:.2f}"
    )


def _by_point(held_out: pd.DataFrame) -> pd.Series[float]:
    """Mean absolute error in % of each point."""
    names = [n for n in ("op", "gpu", "dtype", "params", "threads", "cache") if n in held_out]
    error = 100 * (held_out["predicted_us"] / held_out["measured_us"] - 1).abs()
    keys = [held_out[n].astype(str) for n in names]
    return error.groupby(keys).mean()


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
        source = f"{place}/artifacts/bundle/{FILE}"
        path = mlflow.artifacts.download_artifacts(artifact_uri=source, dst_path=folder)
        return load_held_out(Path(path).parent)


def model_of(registered: Any) -> str:
    """The id of the logged model that a version in the registry was made from."""
    return str(registered.model_id or registered.source.removeprefix("models:/"))


def _save(client: Any, model_id: str, family: str, whole: Bundle, held_out: pd.DataFrame) -> None:
    """Store a family's part of a bundle as the artifacts of a logged model."""
    import mlflow

    part = Bundle(models={family: whole.models[family]}, gpus=whole.gpus, anchors=whole.anchors)
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "bundle"
        part.save(own)
        save_held_out(own, held_out)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*input example.*")
            mlflow.pyfunc.save_model(
                Path(folder) / "model",
                python_model=str(CODE),
                artifacts={"bundle": str(own)},
                signature=signature(family),
                pip_requirements=requirements(),
                metadata={"family": family, "itercast": version("itercast")},
            )
        client.log_model_artifacts(model_id, str(Path(folder) / "model"))


def requirements() -> list[str]:
    """What pricing imports, at the versions installed; itercast itself has to be installed."""
    return [f"{name}=={version(name)}" for name in PINNED]


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
