"""A bundle: per family a gzipped UBJSON model, plain arrays and a table, and a JSON of facts.

Nothing in it is ever executed.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import xgboost as xgb

from learners.family_model import FamilyModel
from learners.features.host_calls import HostCall
from learners.features.machine_speed import Anchors
from learners.features.table import Encoder, feature_table
from learners.models.ensemble import Blend, Smooth
from learners.models.gaussian_process import Process
from learners.models.mlp import Network
from learners.models.regressors import Trees
from learners.models.residuals import Residuals
from learners.transfer.calibration import Calibration
from learners.transfer.source_gpus import Lenders
from microbench.hardware.spec import Gpu, gpu_from_dict
from microbench.ops import families

SHIPPED = Path(__file__).parent / "shipped"
SHIPPED_CPU = SHIPPED.with_name("shipped-cpu")  # of another machine, for a first look
SCHEMA_VERSION = 9
XGBOOST_ERROR: type[Exception] = xgb.core.XGBoostError
DAMAGE = (
    KeyError,
    TypeError,
    AttributeError,
    BadZipFile,
    OSError,
    EOFError,
    zlib.error,
    XGBOOST_ERROR,
)
COLUMNS = ["predicted_us", "predicted_us_p10", "predicted_us_p90", "in_envelope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Models by family, the hardware of their rows, its anchors (``features.machine_speed``)."""

    models: Mapping[str, FamilyModel]
    gpus: Mapping[str, Gpu]
    anchors: Anchors = field(default_factory=dict)

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """predicted_us, its 10 and 90 % quantiles, and whether every input was seen in training.

        ``gpus`` adds or replaces hardware by name. A family without a model is priced by roofline.
        """
        if family not in (known := families()):
            raise ValueError(f"unknown family {family!r}; known: {sorted(known)}")
        if not len(rows):
            return pd.DataFrame(columns=COLUMNS)
        hardware = {**self.gpus, **(gpus or {})}
        if family in self.models:
            found = self.models[family].predict(rows, known[family], hardware)
            values = (found.time_us, found.p10_us, found.p90_us, found.inside)
        else:
            guess = feature_table(rows, known[family], hardware)[1]
            values = (guess, guess / np.e, guess * np.e, np.zeros(len(rows), dtype=bool))
        return pd.DataFrame(dict(zip(COLUMNS, values, strict=True)), index=rows.index)

    def inside(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> Sequence[bool]:
        """in_envelope as ``price`` finds it, of a family with a model; no model is run."""
        hardware = {**self.gpus, **(gpus or {})}
        found = self.models[family].inside(rows, families()[family], hardware)
        return [bool(yes) for yes in found]

    def save(self, folder: Path) -> None:
        """Write to a folder beside and rename, so that half a bundle is never visible."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name, model in self.models.items():
            if model.blend.trees is not None:
                save_trees(model.blend.trees, fresh, name)
            save_smooth(model.blend, fresh / f"{name}.npz")
            if model.residuals is not None:
                save_residuals(model.residuals, fresh / f"{name}.near.parquet")
        facts = {
            "schema_version": SCHEMA_VERSION,
            "gpus": {n: g.to_dict() for n, g in self.gpus.items()},
            "anchors": [[*key, *both_us] for key, both_us in self.anchors.items()],
            "families": {
                name: {
                    "features": m.encoder.names,
                    "vocabulary": m.encoder.vocabulary,
                    "offsets": m.offsets,
                    "share": m.blend.share,
                    "trees": tree_names(name, m.blend.trees),
                    "strange_offsets": m.strange_offsets,
                    "stacks": m.stacks,
                    "measured": m.lenders.measured,
                    "launch": m.launch,
                    "host_calls": {
                        gpu: {op: [*astuple(call)] for op, call in calls.items()}
                        for gpu, calls in m.host_calls.items()
                    },
                    "residuals": m.residuals and [m.residuals.width, m.residuals.nugget],
                    "calibrations": {
                        gpu: [c.kind.tolist(), c.at.tolist(), c.value.tolist()]
                        for gpu, c in m.calibrations.items()
                    },
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
            models = {n: load_model(folder, n, f, gpus) for n, f in facts["families"].items()}
            anchors = {(str(g), int(n)): _pair(us) for g, n, *us in facts["anchors"]}
        except DAMAGE as exc:
            first = (str(exc).splitlines() or [""])[0]
            raise ValueError(f"bundle {str(folder)!r}: damaged ({first})") from exc
        return cls(models=models, gpus=gpus, anchors=anchors)


def save_residuals(residuals: Residuals, path: Path) -> None:
    """Parquet; log errors in thousandths."""
    table = pd.DataFrame({"kind": pd.Categorical(residuals.kind)})
    for i, column in enumerate(residuals.at.T):
        table[f"at{i}"] = column
    table["thousandths"] = np.round(np.clip(residuals.value, -30, 30) * 1000).astype(np.int16)
    table.to_parquet(path, index=False, compression="zstd")


def load_residuals(path: Path, width: float, nugget: float) -> Residuals:
    """As saved."""
    table = pd.read_parquet(path)
    at = [c for c in table if str(c).startswith("at")]
    return Residuals(
        kind=table["kind"].astype(object).to_numpy(),
        at=table[at].to_numpy(dtype=np.float32),
        value=table["thousandths"].to_numpy(dtype=float) / 1000,
        width=width,
        nugget=nugget,
    )


def save_smooth(blend: Blend, path: Path) -> None:
    """Networks and processes as plain arrays, loaded without pickle; no file where there are none.

    An array is called network.w0 or process.at.
    """
    if blend.smooth is None:
        return
    kind = type(blend.smooth).__name__.lower()
    arrays = {f"{kind}.{name}": a for name, a in blend.smooth.to_arrays().items()}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def tree_names(name: str, trees: Trees | None) -> list[str]:
    """NAME, and NAME.COLUMN for the GPU of that column."""
    common = [name] if trees and trees.common else []
    return common + [f"{name}.{column}" for column in (trees.own if trees else {})]


def save_trees(trees: Trees, folder: Path, name: str) -> None:
    """A file each, gzipped UBJSON."""
    boosters = [trees.common] if trees.common else []
    boosters += trees.own.values()
    for stem, booster in zip(tree_names(name, trees), boosters, strict=True):
        packed = gzip.compress(bytes(booster.save_raw("ubj")), mtime=0)
        (folder / f"{stem}.ubj.gz").write_bytes(packed)


def load_trees(folder: Path, name: str, stems: Sequence[str]) -> Trees | None:
    """As saved; only files of the family are opened."""
    found: dict[str, xgb.Booster] = {}
    for stem in stems:
        if stem != name and not stem.removeprefix(f"{name}.").isdecimal():
            raise KeyError(stem)
        found[stem] = xgb.Booster({"nthread": 1})
        packed = (folder / f"{stem}.ubj.gz").read_bytes()
        found[stem].load_model(bytearray(gzip.decompress(packed)))
    common = found.pop(name, None)
    own = {int(stem.removeprefix(f"{name}.")): booster for stem, booster in found.items()}
    return Trees(common=common, own=own) if stems else None


def load_smooth(path: Path, trees: Trees | None, share: float) -> Blend:
    """As saved; a family without the file has trees only, one that is a process alone has none."""
    if trees is not None and not path.is_file():
        return Blend(trees=trees)
    kind, arrays = "", dict[str, np.ndarray]()
    with np.load(path, allow_pickle=False) as file:
        for name in file:
            kind, array = name.split(".")
            arrays[array] = file[name]
    makers: dict[str, Callable[[dict[str, np.ndarray]], Smooth]]
    makers = {"network": Network.from_arrays, "process": Process.from_arrays}
    return Blend(trees=trees, share=share, smooth=makers[kind](arrays))


def _pair(values: Any) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def _host_call(values: Sequence[float]) -> HostCall:
    fixed_us, per_tensor_us, kernels, rows = values
    return HostCall(
        fixed_us=float(fixed_us),
        per_tensor_us=float(per_tensor_us),
        kernels=float(kernels),
        rows=int(rows),
    )


def load_model(
    folder: Path, name: str, facts: Mapping[str, Any], gpus: Mapping[str, Gpu]
) -> FamilyModel:
    """One family of a bundle with the hardware of its rows; only known families are opened."""
    if name not in families():
        raise ValueError(f"bundle {str(folder)!r}: unknown family {name!r}")
    trees, near = load_trees(folder, name, facts["trees"]), facts["residuals"]
    encoder = Encoder(list(facts["features"]), dict(facts["vocabulary"]))
    own = {n: gpus[n] for n in {**facts["stacks"], **facts["measured"]}}
    return FamilyModel(
        blend=load_smooth(folder / f"{name}.npz", trees, float(facts["share"])),
        encoder=encoder,
        lenders=Lenders(encoder=encoder, measured=facts["measured"], gpus=own),
        offsets=_pair(facts["offsets"]),
        strange_offsets=_pair(facts["strange_offsets"]),
        envelope={k: _pair(v) for k, v in facts["envelope"].items()},
        sensitivity=_pair(facts["sensitivity"]),
        facts=facts["facts"],
        stacks={str(k): str(v) for k, v in facts["stacks"].items()},
        launch={str(k): float(v) for k, v in facts["launch"].items()},
        host_calls={
            str(gpu): {str(op): _host_call(call) for op, call in calls.items()}
            for gpu, calls in facts["host_calls"].items()
        },
        residuals=near and load_residuals(folder / f"{name}.near.parquet", *_pair(near)),
        calibrations={
            gpu: Calibration(
                kind=np.array(kind, dtype=object),
                at=np.array(at, dtype=np.float32),
                value=np.array(value, dtype=float),
            )
            for gpu, (kind, at, value) in facts["calibrations"].items()
        },
    )
