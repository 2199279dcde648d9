"""A bundle: one UBJSON model per family and a JSON file of facts; nothing is ever executed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from learners.fit import predict_xgboost
from learners.speed import Anchors
from learners.table import Encoder, feature_table
from microbench.hardware.spec import Gpu, gpu_from_dict
from microbench.ops import families

SCHEMA_VERSION = 2
COLUMNS = ["predicted_us", "predicted_us_p10", "predicted_us_p90", "in_envelope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """One family's booster with what is needed to use it.

    ``offsets``: calibrated 10 % and 90 % quantiles of the log error. ``envelope``: smallest and
    largest value of each number among the training rows. ``sensitivity``: see learners.speed.
    """

    booster: xgb.Booster
    encoder: Encoder
    offsets: tuple[float, float]
    envelope: Mapping[str, tuple[float, float]]
    sensitivity: float
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Models by family, the hardware their rows were measured on, its anchors (learners.speed)."""

    models: Mapping[str, FamilyModel]
    gpus: Mapping[str, Gpu]
    anchors: Anchors = field(default_factory=dict)

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """predicted_us, its 10 and 90 % quantiles, and whether every input was seen in training.

        ``gpus`` adds or replaces hardware by name. A family without a model is priced by roofline.
        """
        known = families()
        if family not in known:
            raise ValueError(f"unknown family {family!r}; known: {sorted(known)}")
        if not len(rows):
            return pd.DataFrame(columns=COLUMNS)
        table, roofline = feature_table(rows, known[family], {**self.gpus, **(gpus or {})})
        if family not in self.models:
            guess, offsets, inside = roofline, (-1.0, 1.0), np.zeros(len(rows), dtype=bool)
        else:
            model = self.models[family]
            guess = predict_xgboost(model.booster, model.encoder.encode(table), roofline)
            offsets, inside = model.offsets, in_envelope(table, model)
        values = (guess, guess * np.exp(offsets[0]), guess * np.exp(offsets[1]), inside)
        return pd.DataFrame(dict(zip(COLUMNS, values, strict=True)), index=rows.index)

    def save(self, folder: Path) -> None:
        """Write to a folder beside and rename, so that half a bundle is never visible."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, model in self.models.items():
            model.booster.save_model(fresh / f"{name}.ubj")
        facts = {
            "schema_version": SCHEMA_VERSION,
            "gpus": {n: g.to_dict() for n, g in self.gpus.items()},
            "anchors": [[gpu, threads, us] for (gpu, threads), us in self.anchors.items()],
            "families": {
                name: {
                    "features": m.encoder.names,
                    "vocabulary": m.encoder.vocabulary,
                    "offsets": m.offsets,
                    "envelope": m.envelope,
                    "sensitivity": m.sensitivity,
                    "facts": m.facts,
                }
                for name, m in self.models.items()
            },
        }
        (fresh / "bundle.json").write_text(json.dumps(facts, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)

    @classmethod
    def load(cls, folder: Path) -> Bundle:
        """ValueError in one line for anything that is not a whole bundle of this version."""
        try:
            facts = json.loads((folder / "bundle.json").read_text())
            version = facts["schema_version"]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"bundle {str(folder)!r}: no readable bundle.json ({exc})") from exc
        if version != SCHEMA_VERSION:
            fits = f"schema version {version}, this code reads {SCHEMA_VERSION}"
            raise ValueError(f"bundle {str(folder)!r}: {fits}")
        try:
            gpus = {n: gpu_from_dict(g, str(folder)) for n, g in facts["gpus"].items()}
            models = {n: load_model(folder, n, f) for n, f in facts["families"].items()}
            anchors = {(str(g), int(n)): float(us) for g, n, us in facts["anchors"]}
        except (KeyError, TypeError, AttributeError, xgb.core.XGBoostError) as exc:
            first = (str(exc).splitlines() or [""])[0]
            raise ValueError(f"bundle {str(folder)!r}: damaged ({first})") from exc
        return cls(models=models, gpus=gpus, anchors=anchors)


def load_model(folder: Path, name: str, facts: Mapping[str, Any]) -> FamilyModel:
    """One family of a bundle; only names of known families are opened."""
    if name not in families():
        raise ValueError(f"bundle {str(folder)!r}: unknown family {name!r}")
    booster = xgb.Booster({"nthread": 1})
    booster.load_model(folder / f"{name}.ubj")
    return FamilyModel(
        booster=booster,
        encoder=Encoder(list(facts["features"]), dict(facts["vocabulary"])),
        offsets=(float(facts["offsets"][0]), float(facts["offsets"][1])),
        envelope={k: (float(v[0]), float(v[1])) for k, v in facts["envelope"].items()},
        sensitivity=float(facts["sensitivity"]),
        facts=facts["facts"],
    )


def in_envelope(table: pd.DataFrame, model: FamilyModel) -> np.ndarray:
    """True where every number lies within the training range and every string was seen."""
    inside = np.ones(len(table), dtype=bool)
    for name, (low, high) in model.envelope.items():
        values = table[name].to_numpy(dtype=float)
        inside &= (values >= low - 1e-6) & (values <= high + 1e-6)
    for name, seen in model.encoder.vocabulary.items():
        inside &= table[name].isin(seen).to_numpy()
    return inside
