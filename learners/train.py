"""Train every family: four learners scored on shapes never trained on, XGBoost into the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from learners.bundle import Bundle
from learners.family_model import LEAST_GPUS, FamilyModel, fit_model, learn, prepare
from learners.features.host_calls import learn_host_calls
from learners.features.machine_speed import (
    Anchors,
    learn_speed,
    reference_anchors,
    retest_ape_pct,
    undisturbed,
)
from learners.features.schema import check_rows
from learners.features.table import ordinary
from learners.models import regressors
from microbench.hardware.spec import Gpu, load_gpu
from microbench.ops import families
from microbench.ops.family import Family
from microbench.store import read_hardware, read_rows

MIN_ROWS = 20
# 10 and 90 % quantiles of norms' log error on GPUs left out, the widest of the op families of
# learners/shipped (its strange_offsets, rounded): NeuSight's and Vidur's rows of eight GPUs.
UNSEEN_GPU_OFFSETS = (-0.42, 0.46)
TEST_SHARE = 0.15
STUDIES = Path(".cache/optuna")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """Errors on unseen shapes by learner, the interval's coverage, and the noise floor."""

    rows: int
    retest_ape_pct: float | None
    coverage_pct: float
    learners: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One FamilyReport per family trained."""

    families: Mapping[str, FamilyReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, MLflow and tables."""
        return {name: asdict(report) for name, report in self.families.items()}


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Absolute percentage errors summed up; bias is the mean signed error."""
    signed = 100 * (predicted / measured - 1)
    ape = np.abs(signed)
    return {
        "mape_pct": float(ape.mean()),
        "median_ape_pct": float(np.median(ape)),
        "p90_ape_pct": float(np.quantile(ape, 0.9)),
        "geomean_ape_pct": float(np.exp(np.log(np.maximum(ape, 0.1)).mean())),
        "worst_ape_pct": float(ape.max()),
        "bias_pct": float(signed.mean()),
    }


def train_family(
    rows: pd.DataFrame,
    family: Family,
    gpus: Mapping[str, Gpu],
    anchors: Anchors,
    trials: int,
    digest: str,
) -> tuple[FamilyReport, FamilyModel]:
    """Score on shapes held out, calibrate the interval out of fold, then refit on all rows."""
    speed = learn_speed(rows, family, anchors)
    prepared = prepare(rows, family, gpus, speed)
    table = prepared.table
    known, held = regressors.group_split(table.group, TEST_SHARE, seed=0, op=rows["op"].to_numpy())
    train, test = table.take(known), table.take(held)
    STUDIES.mkdir(parents=True, exist_ok=True)
    options = regressors.tune(
        train, trials, 0, str(STUDIES / f"{family.name}-{digest}.log"), family.name
    )
    part = learn(prepared, known, options)
    guess = part.predict_us(held)
    inside = np.log(test.time_us / guess)
    low, high = part.crossed.offsets
    baselines = {
        "roofline": regressors.predict_roofline,
        "linear": regressors.predict_linear,
        "nearest": regressors.predict_nearest,
    }
    scores = {
        name: errors(predict(train, test.x, test.roofline_us), test.time_us)
        for name, predict in baselines.items()
    }
    report = FamilyReport(
        rows=len(rows),
        retest_ape_pct=retest_ape_pct(rows, family, speed),
        coverage_pct=float(np.mean((inside >= low) & (inside <= high)) * 100),
        learners={"xgboost": errors(guess, test.time_us), **scores},
    )
    residual = np.log(table.time_us / part.blend_us(np.arange(len(rows))))
    residual[known] = part.crossed.residual
    crossed = replace(part.crossed, residual=residual)
    facts = {
        "digest": digest,
        "rows": len(rows),
        "errors": dict(report.learners["xgboost"]),
        "ops": ops_by_dtype(rows),
    }
    model = fit_model(prepared, options, crossed, speed.sensitivity, facts)
    return report, replace(model, host_calls=learn_host_calls(rows, family, gpus))


def ops_by_dtype(rows: pd.DataFrame) -> dict[str, list[str]]:
    """The ops that were measured in each dtype."""
    return {str(dtype): sorted(ops.unique()) for dtype, ops in rows.groupby("dtype")["op"]}


def hardware_of(roots: Sequence[Path], rows: pd.DataFrame) -> dict[str, Gpu]:
    """Hardware of every GPU in the rows: from the cards, else from our files."""
    known = read_hardware(roots)
    return {str(n): known.get(str(n)) or load_gpu(str(n)) for n in rows["gpu"].unique()}


def train(
    roots: Sequence[Path],
    out: Path,
    names: Sequence[str] | None = None,
    trials: int = 0,
    limit: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> TrainReport:
    """Train the families that have rows and save the bundle; ValueError where there are none.

    ``limit``: at most so many rows of a family, see ``thin``.
    """
    tables = {name: thin(rows, limit) for name, rows in usable_rows(roots, names).items()}
    anchors = reference_anchors(tables)
    tables = {name: undisturbed(rows, anchors) for name, rows in tables.items()}
    reports, models, gpus = {}, {}, {}
    for name, rows in tables.items():
        if on_progress:
            on_progress(name)
        found = hardware_of(roots, rows)
        digest = hashlib.sha256(
            pd.util.hash_pandas_object(rows.astype(str), index=False).to_numpy().tobytes()
        ).hexdigest()[:12]
        reports[name], models[name] = train_family(
            rows, families()[name], found, anchors, trials, digest
        )
        gpus.update(found)
    Bundle(models=widened(models), gpus=gpus, anchors=anchors).save(out)
    return TrainReport(families=reports)


def widened(models: Mapping[str, FamilyModel]) -> dict[str, FamilyModel]:
    """Families known on one or two GPUs err on others as widely as any that is known on more.

    At least as ``UNSEEN_GPU_OFFSETS``. Curves keep their own: they lend nothing.
    """
    several = [m.strange_offsets for m in models.values() if _gpus(m) >= LEAST_GPUS]
    low = min(offsets[0] for offsets in [*several, UNSEEN_GPU_OFFSETS])
    high = max(offsets[1] for offsets in [*several, UNSEEN_GPU_OFFSETS])

    def one(model: FamilyModel) -> FamilyModel:
        if not 0 < _gpus(model) < LEAST_GPUS:
            return model
        own = model.strange_offsets
        return replace(model, strange_offsets=(min(own[0], low), max(own[1], high)))

    return {name: one(model) for name, model in models.items()}


def _gpus(model: FamilyModel) -> int:
    """How many GPUs lend."""
    known = model.lenders.gpus
    return sum(known[name].kind != "cpu" for name in model.lenders.measured)


def thin(rows: pd.DataFrame, limit: int | None) -> pd.DataFrame:
    """At most ``limit`` rows, as even as can be over GPUs, software, ops and dtypes."""
    if limit is None or len(rows) <= limit:
        return rows
    kinds = [c for c in ("gpu", "stack", "op", "dtype") if c in rows]
    mixed = rows.iloc[np.random.default_rng(0).permutation(len(rows))]
    turn = mixed.groupby(kinds, dropna=False).cumcount()
    return (
        mixed.loc[turn.sort_values(kind="stable").index[:limit]].sort_index().reset_index(drop=True)
    )


def usable_rows(roots: Sequence[Path], names: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """Ordinary rows with status ok of families that have enough; ValueError where none has."""
    unknown = sorted(set(names or []) - set(families()))
    if unknown:
        raise ValueError(f"unknown family {unknown[0]!r}; known: {sorted(families())}")
    tables = {}
    for name in names or families():
        rows = read_rows(roots, name)
        if len(rows):
            check_rows(rows, families()[name])
            rows = ordinary(rows[rows["status"] == "ok"]).reset_index(drop=True)
        if len(rows) >= MIN_ROWS:
            tables[name] = rows
    if not tables:
        where = ", ".join(str(r) for r in roots)
        raise ValueError(f"no family has {MIN_ROWS} measured rows under {where}")
    return tables
