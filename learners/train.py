"""Train every family: four learners scored on shapes never trained on, XGBoost into the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from learners import fit
from learners.bundle import Bundle, FamilyModel
from learners.table import Encoder, feature_table, is_number, shape_groups
from microbench.hardware.spec import Gpu, load_gpu
from microbench.ops import families
from microbench.ops.family import Family
from microbench.store import read_hardware, read_rows

MIN_ROWS = 20
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


def corrected_us(rows: pd.DataFrame) -> np.ndarray:
    """Measured time at the machine's reference speed."""
    speed = rows["speed_frac"].fillna(1.0) if "speed_frac" in rows else 1.0
    return np.asarray(rows["time_us"] * speed, dtype=float)


def retest_ape_pct(rows: pd.DataFrame, family: Family) -> float | None:
    """Median difference between two measurements of one point far apart: the noise floor."""
    if "repeat" not in rows:
        return None
    names = [f.name for f in fields(family.params) if f.name in rows]
    names += [n for n in ("gpu", "threads", "cache") if n in rows]
    timed = rows[[*names, "repeat"]].assign(time=corrected_us(rows))
    first = timed[timed["repeat"] == 0].drop_duplicates(names)
    again = timed[timed["repeat"] == 1].drop_duplicates(names)
    pairs = first.merge(again, on=names)
    if len(pairs) < 2:
        return None
    return float(np.median(np.abs(pairs["time_y"] / pairs["time_x"] - 1)) * 100)


def train_family(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu], trials: int, digest: str
) -> tuple[FamilyReport, FamilyModel]:
    """Score on shapes held out, calibrate the interval out of fold, then refit on all rows."""
    features, roofline = feature_table(rows, family, gpus)
    encoder = Encoder.fit(features)
    table = fit.Table(
        x=encoder.encode(features),
        roofline_us=roofline,
        time_us=corrected_us(rows),
        group=shape_groups(rows, family),
    )
    known, held = fit.group_split(table.group, 0.15, seed=0)
    train, test = table.take(known), table.take(held)
    STUDIES.mkdir(parents=True, exist_ok=True)
    journal = str(STUDIES / f"{family.name}-{digest}.log")
    options = fit.tune(train, trials, 0, journal, family.name)
    booster = fit.fit_xgboost(train, options)
    guess = fit.predict_xgboost(booster, test.x, test.roofline_us)
    offsets = calibrate(train, options)
    inside = np.log(test.time_us / guess)
    coverage = float(np.mean((inside >= offsets[0]) & (inside <= offsets[1])) * 100)
    baselines = {
        "roofline": fit.predict_roofline,
        "linear": fit.predict_linear,
        "nearest": fit.predict_nearest,
    }
    scores = {
        name: errors(predict(train, test.x, test.roofline_us), test.time_us)
        for name, predict in baselines.items()
    }
    report = FamilyReport(
        rows=len(rows),
        retest_ape_pct=retest_ape_pct(rows, family),
        coverage_pct=coverage,
        learners={"xgboost": errors(guess, test.time_us), **scores},
    )
    numbers = [str(c) for c in features if is_number(features[c])]
    model = FamilyModel(
        booster=fit.fit_xgboost(table, options),
        encoder=encoder,
        offsets=offsets,
        envelope={c: (float(features[c].min()), float(features[c].max())) for c in numbers},
        facts={"digest": digest, "rows": len(rows), "errors": dict(report.learners["xgboost"])},
    )
    return report, model


def calibrate(train: fit.Table, options: dict[str, Any]) -> tuple[float, float]:
    """10 and 90 % quantiles of the log error on shapes held out, three folds."""
    residuals = []
    for seed in range(1, 4):
        rest, held = fit.group_split(train.group, 0.25, seed)
        if not len(rest):
            rest = held
        booster = fit.fit_xgboost(train.take(rest), options, seed)
        guess = fit.predict_xgboost(booster, train.x[held], train.roofline_us[held])
        residuals.append(np.log(train.time_us[held] / guess))
    low, high = np.quantile(np.concatenate(residuals), [0.1, 0.9])
    return float(low), float(high)


def hardware_of(roots: Sequence[Path], rows: pd.DataFrame) -> dict[str, Gpu]:
    """Hardware of every GPU in the rows: from the cards, else from our files."""
    known = read_hardware(roots)
    return {str(n): known.get(str(n)) or load_gpu(str(n)) for n in rows["gpu"].unique()}


def train(
    roots: Sequence[Path],
    out: Path,
    names: Sequence[str] | None = None,
    trials: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> TrainReport:
    """Train the families that have rows and save the bundle; ValueError where there are none."""
    reports, models, gpus = {}, {}, {}
    unknown = sorted(set(names or []) - set(families()))
    if unknown:
        raise ValueError(f"unknown family {unknown[0]!r}; known: {sorted(families())}")
    for name, family in families().items():
        if names and name not in names:
            continue
        rows = read_rows(roots, name)
        rows = rows[rows["status"] == "ok"].reset_index(drop=True) if len(rows) else rows
        if len(rows) < MIN_ROWS:
            continue
        if on_progress:
            on_progress(name)
        found = hardware_of(roots, rows)
        digest = hashlib.sha256(
            pd.util.hash_pandas_object(rows.astype(str), index=False).to_numpy().tobytes()
        ).hexdigest()[:12]
        reports[name], models[name] = train_family(rows, family, found, trials, digest)
        gpus.update(found)
    if not models:
        where = ", ".join(str(r) for r in roots)
        raise ValueError(f"no family has {MIN_ROWS} measured rows under {where}")
    Bundle(models=models, gpus=gpus).save(out)
    return TrainReport(families=reports)
