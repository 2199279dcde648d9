"""A bundle: trained models of op families in a folder, as JSON, UBJSON and NumPy arrays.

Loading one executes nothing (no pickle).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.close_names import unknown
from itercast.capture.base.files import folder_at_once
from itercast.capture.base.slow_imports import pd, xgb
from itercast.capture.base.yaml_text import made_of
from itercast.learners.family_model import FamilyModel
from itercast.learners.features.host_calls import HostCall
from itercast.learners.features.machine_speed import Anchors
from itercast.learners.features.table import Encoder, feature_table
from itercast.learners.machine import Machine
from itercast.learners.models.ensemble import Ensemble, EnsembleInFiles, Smooth
from itercast.learners.models.gaussian_process import GaussianProcess
from itercast.learners.models.mlp import Network
from itercast.learners.models.tree_files import read_trees, without_statistics
from itercast.learners.models.trees import Trees
from itercast.learners.transfer.calibration import Calibration
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.store import Facts, Row

SHIPPED = Path(__file__).resolve().parent / "shipped"
SHIPPED_CPU = SHIPPED.with_name("shipped-cpu")  # trained on one CPU, as an example
SCHEMA_VERSION = 11
SAME_ON_CPUS = 10  # an older version, from which this one differs by products on GPUs alone
FACTS = "bundle.json"
ROOFLINE_LOG_INTERVAL = assumed(__file__, "roofline_log_interval")
DAMAGE = (
    ValueError,  # also xgboost's error
    LookupError,
    ArithmeticError,
    RuntimeError,  # zip files with unknown compression
    MemoryError,  # arrays that state to be huge
    TypeError,
    AttributeError,
    BadZipFile,
    OSError,
    EOFError,
    zlib.error,
)
MODEL_FILES = ("*.ubj.gz", "*.npz")
HOST_CALL = [f.name for f in fields(HostCall)]
COLUMNS = ["predicted_us", "predicted_us_p10", "predicted_us_p90", "in_envelope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Models by family, hardware by name, and anchor times (``features.machine_speed``).

    ``machines``: versions and readings of GPUs that itercast measured, by name. ``digest``: of the
    files that it was read from; empty once anything was replaced.
    """

    models: Mapping[str, FamilyModel]
    gpus: Mapping[str, Gpu]
    anchors: Anchors = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    digest: str = field(default="", init=False)

    def price(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> pd.DataFrame:
        """Forecast rows of one family: a table of COLUMNS, indexed as the rows.

        ``predicted_us``, its 10 and 90 % quantiles, and ``in_envelope``: whether every input was
        seen in training. ``gpus`` adds or replaces hardware by name. A family without a model is
        forecast by its roofline.
        """
        if family not in (known := families()):
            raise unknown("family", family, known)
        if not len(rows):
            return pd.DataFrame(columns=COLUMNS)
        hardware = {**self.gpus, **(gpus or {})}
        if family in self.models:
            forecasts = self.models[family].predict(rows, known[family], hardware)
            values = (forecasts.time_us, forecasts.p10_us, forecasts.p90_us, forecasts.inside)
        else:
            roofline_us = feature_table(rows, known[family], hardware)[1]
            factor = np.exp(ROOFLINE_LOG_INTERVAL)
            values = (
                roofline_us,
                roofline_us / factor,
                roofline_us * factor,
                np.zeros(len(rows), dtype=bool),
            )
        return pd.DataFrame(dict(zip(COLUMNS, values, strict=True)), index=rows.index)

    def inside(
        self, family: str, rows: pd.DataFrame, gpus: Mapping[str, Gpu] | None = None
    ) -> Sequence[bool]:
        """The column ``in_envelope`` of ``price``, without running the family's model."""
        hardware = {**self.gpus, **(gpus or {})}
        in_envelope = self.models[family].inside(rows, families()[family], hardware)
        return [bool(yes) for yes in in_envelope]

    def save(self, folder: Path) -> None:
        """Write to a temporary folder and rename it, so that a partial bundle is never visible.

        Where ``folder`` is a symbolic link, the folder that it leads to is replaced.
        """
        check_out(folder)
        folder = Path(os.path.realpath(folder))
        facts: Row = {
            "schema_version": SCHEMA_VERSION,
            "gpus": {n: g.to_dict() for n, g in self.gpus.items()},
            "anchors": [[*key, *both_us] for key, both_us in self.anchors.items()],
            "machines": {name: asdict(machine) for name, machine in self.machines.items()},
            "families": {name: family_facts(name, m) for name, m in self.models.items()},
        }
        with folder_at_once(folder) as fresh:
            for name, model in self.models.items():
                if model.ensemble.trees is not None:
                    save_trees(model.ensemble.trees, fresh, name)
                save_smooth(model.ensemble, fresh / f"{name}.npz")
            facts["digests"] = digests(fresh, facts)
            (fresh / FACTS).write_text(json.dumps(facts, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Bundle:
        """Read a bundle; ValueError, in one line, unless it is whole and of this version."""
        try:
            text = (folder / FACTS).read_text()
            facts = json.loads(text)
            version = facts["schema_version"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
            raise ValueError(f"bundle {str(folder)!r}: no readable bundle.json ({exc})") from exc
        if version != SCHEMA_VERSION and not (version == SAME_ON_CPUS and _is_of_cpus(facts)):
            fits = f"schema version {version}, this code reads {SCHEMA_VERSION}"
            raise ValueError(f"bundle {str(folder)!r}: {fits}")
        try:
            check_digests(folder, facts)
            gpus = {n: made_of(Gpu, g, str(folder)) for n, g in facts["gpus"].items()}
            models = {n: load_model(folder, n, f, gpus) for n, f in facts["families"].items()}
            anchors = {(str(g), int(n)): _pair(us) for g, n, *us in facts["anchors"]}
            machines = facts.get("machines", {})
            machines = {n: made_of(Machine, m, str(folder)) for n, m in machines.items()}
        except DAMAGE as exc:
            first = (str(exc).splitlines() or [""])[0] or type(exc).__name__
            raise ValueError(f"bundle {str(folder)!r} cannot be used: {first}") from exc
        digest = hashlib.sha256(text.encode()).hexdigest() if "digests" in facts else ""
        bundle = cls(models=models, gpus=gpus, anchors=anchors, machines=machines)
        object.__setattr__(bundle, "digest", digest)  # frozen otherwise
        return bundle


def _is_of_cpus(facts: Facts) -> bool:
    """Whether the hardware of a bundle's facts, as far as it is readable, is CPUs alone."""
    gpus = facts.get("gpus")
    hardware = list(gpus.values()) if isinstance(gpus, dict) else [None]
    return all(isinstance(one, dict) and one.get("kind") == "cpu" for one in hardware)


def check_out(folder: Path) -> None:
    """ValueError where a bundle, which replaces its whole folder, would delete other files."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FACTS).is_file():
        raise ValueError(f"out {str(folder)!r}: holds other files and no bundle; name a new folder")


def digests(folder: Path, facts: Facts) -> dict[str, str]:
    """SHA-256 of every file that ``Bundle.save`` writes, and of the other values of bundle.json."""
    own = {name: value for name, value in facts.items() if name != "digests"}
    texts = {FACTS: json.dumps(own, sort_keys=True).encode()}
    files = [path for end in MODEL_FILES for path in folder.glob(end)]
    texts |= {path.name: path.read_bytes() for path in sorted(files)}
    return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def check_digests(folder: Path, facts: Facts) -> None:
    """ValueError where a file differs from its digest; bundles of older versions have none."""
    stated = facts.get("digests")
    if stated is None:
        return
    actual = digests(folder, facts)
    if lacking := sorted(stated.keys() - actual.keys()):
        raise ValueError(f"its file {lacking[0]} is missing")
    changed = sorted(name for name in actual if stated.get(name) != actual[name])
    if changed:
        raise ValueError(f"{changed[0]} is not the file that was written, by its digest")


def family_facts(name: str, model: FamilyModel) -> Row:
    """What bundle.json holds of one family."""
    return {
        "features": model.encoder.names,
        "vocabulary": model.encoder.vocabulary,
        "offsets": model.offsets,
        "share": model.ensemble.share,
        "trees": tree_names(name, model.ensemble.trees),
        "unseen_offsets": model.unseen_offsets,
        "stacks": model.stacks,
        "measured": model.source_gpus.measured,
        "launch": model.launch,
        "host_calls": {
            gpu: {op: [*astuple(call)] for op, call in calls.items()}
            for gpu, calls in model.host_calls.items()
        },
        "calibrations": {
            gpu: [c.kind.tolist(), c.at.tolist(), c.value.tolist()]
            for gpu, c in model.calibrations.items()
        },
        "envelope": model.envelope,
        "sensitivity": model.sensitivity,
        "facts": model.facts,
    }


def save_smooth(ensemble: Ensemble, path: Path) -> None:
    """Write the networks or the Gaussian process of an ensemble as .npz; nothing if it has none.

    Arrays are named network.w0, process.at and so on.
    """
    if ensemble.smooth is None:
        return
    kind = "network" if isinstance(ensemble.smooth, Network) else "process"
    arrays = {f"{kind}.{name}": a for name, a in ensemble.smooth.to_arrays().items()}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def tree_names(name: str, trees: Trees | None) -> list[str]:
    """File stems of a family's trees: NAME for the common ones, NAME.COLUMN for a GPU's own."""
    common = [name] if trees and trees.common else []
    return common + [f"{name}.{column}" for column in (trees.own if trees else {})]


def save_trees(trees: Trees, folder: Path, name: str) -> None:
    """Write each booster as a file of gzipped UBJSON."""
    boosters = [trees.common] if trees.common else []
    boosters += trees.own.values()
    for stem, booster in zip(tree_names(name, trees), boosters, strict=True):
        packed = gzip.compress(without_statistics(bytes(booster.save_raw("ubj"))), mtime=0)
        (folder / f"{stem}.ubj.gz").write_bytes(packed)


@dataclass(frozen=True, slots=True)
class ShippedTrees(Mapping[int, "xgb.Booster"]):
    """Boosters by column from files that ship, each read when it is first used."""

    paths: Mapping[int, Path]
    loaded: dict[int, xgb.Booster] = field(default_factory=dict)

    def __getitem__(self, column: int) -> xgb.Booster:
        if column not in self.loaded:
            self.loaded[column] = booster(gzip.decompress(self.paths[column].read_bytes()))
        return self.loaded[column]

    def __iter__(self) -> Iterator[int]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def booster(raw: bytes) -> xgb.Booster:
    """Trees read from UBJSON, set to predict on one thread."""
    trees = xgb.Booster({"nthread": 1})
    trees.load_model(bytearray(raw))
    return trees


def load_trees(folder: Path, name: str, stems: Sequence[str], columns: int) -> Trees | None:
    """Read trees of ``columns`` features; KeyError for a stem that is not the family's."""
    if not stems:
        return None
    column_of = {f"{name}.{column}": column for column in range(columns)}
    paths = {column_of[stem]: folder / f"{stem}.ubj.gz" for stem in stems if stem != name}
    common = folder / f"{name}.ubj.gz" if name in stems else None
    if folder.resolve() in (SHIPPED, SHIPPED_CPU):
        shared = booster(gzip.decompress(common.read_bytes())) if common else None
        return Trees(common=shared, own=ShippedTrees(paths))
    shared = booster(read_trees(common, columns)) if common else None
    own = {column: booster(read_trees(path, columns)) for column, path in paths.items()}
    return Trees(common=shared, own=own)


def load_ensemble(folder: Path, name: str, facts: Facts, columns: int) -> Ensemble:
    """Read an ensemble of ``columns`` features; without a .npz file it is trees alone."""
    trees, path = load_trees(folder, name, facts["trees"], columns), folder / f"{name}.npz"
    if trees is not None and not path.is_file():
        return Ensemble(trees=trees)
    kind, arrays = "", dict[str, np.ndarray]()
    with np.load(path, allow_pickle=False) as file:
        for name in file:
            kind, array = name.split(".")
            arrays[array] = file[name]
    makers: dict[str, Callable[[dict[str, np.ndarray]], Smooth]]
    makers = {"network": Network.from_arrays, "process": GaussianProcess.from_arrays}
    return Ensemble(trees=trees, share=float(facts["share"]), smooth=makers[kind](arrays))


def _pair(two: Sequence[float]) -> tuple[float, float]:
    return float(two[0]), float(two[1])


def load_model(folder: Path, name: str, facts: Facts, gpus: Mapping[str, Gpu]) -> FamilyModel:
    """Read the model of family ``name``; ``facts``: its entry in the bundle's JSON.

    ValueError for an unknown family or learner.
    """
    if name not in families():
        raise unknown("family", name, families())
    if "learner" in facts:
        learner = facts["learner"]["name"]
        raise ValueError(f"learner {learner!r} of {name}: only the blend prices now; train again")
    encoder = Encoder(list(facts["features"]), dict(facts["vocabulary"]))
    columns = len(encoder.column_numbers(encoder.names))
    read = partial(load_ensemble, folder, name, facts, columns)
    shipped = folder.resolve() in (SHIPPED, SHIPPED_CPU)  # part of the code: digests were checked
    sources = {n: gpus[n] for n in {**facts["stacks"], **facts["measured"]}}
    return FamilyModel(
        ensemble=EnsembleInFiles(read) if shipped else read(),
        encoder=encoder,
        source_gpus=SourceGpus(encoder=encoder, measured=facts["measured"], gpus=sources),
        offsets=_pair(facts["offsets"]),
        unseen_offsets=_pair(facts["unseen_offsets"]),
        envelope={k: _pair(v) for k, v in facts["envelope"].items()},
        sensitivity=_pair(facts["sensitivity"]),
        facts=facts["facts"],
        stacks={str(k): str(v) for k, v in facts["stacks"].items()},
        launch={str(k): float(v) for k, v in facts["launch"].items()},
        host_calls={
            gpu: {
                op: HostCall(**dict(zip(HOST_CALL, call, strict=True)))
                for op, call in calls.items()
            }
            for gpu, calls in facts["host_calls"].items()
        },
        calibrations={
            gpu: Calibration(
                kind=np.array(kind, dtype=object),
                at=np.array(at, dtype=np.float32),
                value=np.array(value, dtype=float),
            )
            for gpu, (kind, at, value) in facts["calibrations"].items()
        },
    )
