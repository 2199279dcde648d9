"""Trains a bundle: per op family, scores learners on unseen shapes and fits the final model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import made_of
from itercast.learners.bundle import Bundle
from itercast.learners.compare import held_out_us
from itercast.learners.family_model import FamilyModel, Learned, fit_model, learn, prepare
from itercast.learners.features.host_calls import learn_host_calls
from itercast.learners.features.machine_speed import (
    Anchors,
    learn_speed,
    reference_anchors,
    retest_ape_pct,
    undisturbed,
)
from itercast.learners.features.table import shape_places
from itercast.learners.held_out import held_out_forecasts
from itercast.learners.intervals import MIN_GPUS, unseen_offsets
from itercast.learners.machine import machines_of
from itercast.learners.models import trees
from itercast.learners.models.compared import BLEND
from itercast.learners.models.noise import medians
from itercast.learners.models.training_table import Table, frozen_split
from itercast.learners.seen_shapes import with_shapes
from itercast.learners.training_rows import MIN_ROWS, usable_rows
from itercast.learners.transfer.offsets import Offsets
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family
from itercast.microbench.store import Facts, Row, read_hardware

UNSEEN_GPU_OFFSETS = assumed(__file__, "unseen_gpu_offsets")
TEST_SHARE = 0.15  # no assumption: of the shape groups; held out to score learners
SCORES = "scores.json"  # in a bundle's folder: its ``TrainReport`` as plain values


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """Scores of one family: errors on held-out shapes, interval coverage, noise floor.

    ``parameters``: of the blend, which prices the family; ``learners``: errors of each, and its
    ``rank``, which learners that differ by less than the noise share; ``learner_seconds``: of
    those that were timed apart; ``shapes``: how many were held out. ``held_out``: the blend's
    forecasts that were scored (``itercast.learners.held_out``). ``trials``: of hyperparameters,
    see ``trees.Tuned``.
    """

    rows: int
    parameters: Facts
    seconds: float
    retest_ape_pct: float | None
    coverage_pct: float
    learners: Mapping[str, Mapping[str, float]]
    learner_seconds: Mapping[str, float] = field(default_factory=dict)
    shapes: int = 0
    trials: Sequence[Facts] = ()
    held_out: pd.DataFrame = field(default_factory=pd.DataFrame, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Scores of a training run, by family."""

    families: Mapping[str, FamilyReport]

    def to_dict(self) -> Row:
        """The scores as plain values, for JSON, MLflow and tables."""
        scores = {name: asdict(report) for name, report in self.families.items()}
        for entry in scores.values():
            del entry["held_out"]
        return scores

    def held_out(self) -> pd.DataFrame:
        """The scored forecasts of all families, a row per held-out row."""
        return pd.concat([r.held_out for r in self.families.values()], ignore_index=True)


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Statistics of absolute percentage errors; ``bias_pct`` is the mean signed error."""
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
    settings: TrainSettings,
) -> tuple[FamilyReport, FamilyModel]:
    """Score learners on held-out shapes, then fit the final model to all rows of the family.

    ``gpus``: hardware by name; ``anchors``: reference times of the machine's speed. Intervals come
    from out-of-fold errors.
    """
    begin, digest = time.monotonic(), digest_of(rows)
    speed = learn_speed(rows, family, anchors)
    prepared = prepare(rows, family, gpus, speed)
    ops = rows["op"].to_numpy().astype(str)
    trained, held = frozen_split(shape_places(rows, family), TEST_SHARE, ops)
    train = prepared.table.take(trained)
    tuned = trees.tune(train, settings.trials, settings.storage, f"{family.name}-{digest}")
    learned = learn(prepared, trained, tuned.options)
    retest = retest_ape_pct(rows, family, speed)
    forecasts_us, took_s = {BLEND: learned.predict_us(held)}, {BLEND: time.monotonic() - begin}
    forecasts_us |= held_out_us(learned, trained, held, tuned.options, took_s)
    offsets = learned.crossed.offsets
    scored, coverage_pct = _scores(forecasts_us, prepared.table.take(held), retest, offsets)
    report = FamilyReport(
        rows=len(rows),
        parameters={"share_of_smooth_model": learned.crossed.share, **tuned.options},
        seconds=time.monotonic() - begin,
        retest_ape_pct=retest,
        coverage_pct=coverage_pct,
        learners=scored,
        learner_seconds=took_s,
        shapes=len(np.unique(prepared.table.group[held])),
        held_out=held_out_forecasts(
            learned, rows, family, trained, held, forecasts_us[BLEND], offsets
        ),
        trials=tuned.trials,
    )
    return report, replace(
        _of_all_rows(learned, trained, tuned.options),
        sensitivity=speed.sensitivity,
        facts=_facts(report, rows, digest, family),
        host_calls=learn_host_calls(rows, family, gpus),
    )


def _of_all_rows(learned: Learned, trained: np.ndarray, options: trees.Options) -> FamilyModel:
    """The blend fitted to all rows.

    Its interval is by errors on rows that a model did not learn: for the rows ``trained`` in
    cross-validation, for held-out rows by the blend of the trained ones.
    """
    prepared = learned.prepared
    all_rows = np.arange(len(prepared.kind))
    residual = np.log(prepared.table.time_us / learned.predict_us(all_rows))
    residual[trained] = learned.crossed.residual
    crossed = replace(learned.crossed, residual=residual)
    unseen = unseen_offsets(prepared, options, crossed.offsets)
    return fit_model(prepared, options, crossed, unseen)


def _scores(
    forecasts_us: Mapping[str, np.ndarray],
    test: Table,
    retest_ape_pct: float | None,
    offsets: Offsets,
) -> tuple[dict[str, dict[str, float]], float]:
    """Errors and rank of each learner on held-out rows, and the coverage of the blend in %."""
    log_errors = {name: np.log(test.time_us / us) for name, us in forecasts_us.items()}
    ranks = medians(log_errors, test.group, retest_ape_pct).ranks()
    (low, high), error = offsets, log_errors[BLEND]
    covered_frac = np.mean((error >= low) & (error <= high))
    scored = {n: {**errors(us, test.time_us), "rank": ranks[n]} for n, us in forecasts_us.items()}
    return scored, float(covered_frac * 100)


def _facts(report: FamilyReport, rows: pd.DataFrame, digest: str, family: Family) -> Row:
    """What the bundle keeps about a family's training: rows, held-out errors, ops by dtype."""
    return {
        "digest": digest,
        "rows": report.rows,
        "errors": dict(report.learners[BLEND]),
        "retest_ape_pct": report.retest_ape_pct,
        "ops": {str(k): sorted(ops.unique()) for k, ops in rows.groupby("dtype")["op"]},
        "shapes": with_shapes("", rows, family),
    }


def digest_of(rows: pd.DataFrame) -> str:
    """Twelve hexadecimal digits of a hash of all values of the rows, in their order."""
    hashes = pd.util.hash_pandas_object(rows.astype(str), index=False).to_numpy()
    return hashlib.sha256(hashes.tobytes()).hexdigest()[:12]


def hardware_of(
    roots: Sequence[Path], rows: pd.DataFrame, stated: Mapping[str, Row] = MappingProxyType({})
) -> dict[str, Gpu]:
    """Hardware of every GPU in the rows, by name.

    As ``stated``, else by the datasets' cards, else by the hardware files. ValueError that names
    the missing card where none of them has it.
    """
    gpus = read_hardware(roots)
    gpus |= {name: made_of(Gpu, facts, f"hardware of {name}") for name, facts in stated.items()}
    return {str(n): gpus.get(str(n)) or _known_gpu(str(n)) for n in rows["gpu"].unique()}


def _known_gpu(name: str) -> Gpu:
    """The GPU of a hardware file; ValueError says that no card states it either."""
    try:
        return load_gpu(name)
    except ValueError as exc:
        raise ValueError(f"rows of {name!r}: no card.yaml states its hardware; {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How families are trained.

    ``trials`` of hyperparameters are tried first, in the database ``storage``; ``memory``: bytes
    that a family may take. ``gpus``: hardware by name, as fields, in place of the datasets' cards.
    """

    roots: Sequence[Path]
    trials: int = 0
    memory: int | None = None
    storage: str | None = None
    gpus: Mapping[str, Row] = field(default_factory=dict)


OnProgress = Callable[[str], None]  # gets the name of a family that is trained
Fits = Iterator[tuple[str, FamilyReport, Bundle]]
FitAll = Callable[[Mapping[str, pd.DataFrame], Anchors, TrainSettings, OnProgress | None], Fits]


def fit_in_turn(
    tables: Mapping[str, pd.DataFrame],
    anchors: Anchors,
    settings: TrainSettings,
    on_progress: OnProgress | None = None,
) -> Fits:
    """Train one family after the other; yields the report and a bundle of each."""
    for name, rows in tables.items():
        if on_progress:
            on_progress(name)
        gpus = hardware_of(settings.roots, rows, settings.gpus)
        report, model = train_family(rows, families()[name], gpus, anchors, settings)
        yield name, report, Bundle(models={name: model}, gpus=gpus, anchors=anchors)


def train(
    roots: Sequence[Path],
    out: Path,
    names: Sequence[str] | None = None,
    trials: int = 0,
    memory: int | None = None,
    on_progress: OnProgress | None = None,
    storage: str | None = None,
    into: Bundle | None = None,
    fit_all: FitAll = fit_in_turn,
) -> TrainReport:
    """Train the families that have rows and save the bundle; ValueError where there are none.

    ``trials`` to ``storage``: see ``TrainSettings``; without ``memory`` all rows are in memory, and
    trials that are in ``storage`` already are not run again. ``into``: a bundle whose other
    families are saved too; times are then corrected to the speed that its families refer to, and
    GPUs have the peaks that these have learned with.
    ``fit_all``: here, or on several machines (entry point ``itercast.trainers``).
    """
    settings = TrainSettings(roots=roots, trials=trials, memory=memory, storage=storage)
    tables = usable_rows(roots, names, memory)
    return train_tables(tables, settings, out, on_progress, into, fit_all)


def train_tables(
    tables: Mapping[str, pd.DataFrame],
    settings: TrainSettings,
    out: Path,
    on_progress: OnProgress | None = None,
    into: Bundle | None = None,
    fit_all: FitAll = fit_in_turn,
) -> TrainReport:
    """Train families on these rows and save the bundle, see ``train``."""
    anchors = {**reference_anchors(tables), **(into.anchors if into else {})}
    tables = {name: undisturbed(rows, anchors) for name, rows in tables.items()}
    for name, rows in tables.items():
        if into and len(rows) < MIN_ROWS:
            raise ValueError(
                f"{name}: {len(rows)} rows were measured at about the speed of the machine that "
                f"the bundle's families refer to, {MIN_ROWS} are needed; train all families anew"
            )
    if into and set(into.models) - set(tables):
        settings = replace(settings, gpus={name: gpu.to_dict() for name, gpu in into.gpus.items()})
    machines = machines_of(settings.roots, tables)
    bundles = [Bundle(models={}, gpus={}, anchors=anchors, machines=machines)]
    reports = {}
    for name, report, bundle in fit_all(tables, anchors, settings, on_progress):
        reports[name] = report
        bundles.append(bundle)
    joined([into, *bundles] if into else bundles).save(out)
    return TrainReport(families={name: reports[name] for name in tables})


def joined(bundles: Sequence[Bundle]) -> Bundle:
    """One bundle of all families; the last bundle counts if two have the same one.

    Intervals on unseen GPUs are widened over all. ValueError where bundles were trained at
    different reference speeds of one machine.
    """
    gpus = {name: gpu for bundle in bundles for name, gpu in bundle.gpus.items()}
    models = {name: model for bundle in bundles for name, model in bundle.models.items()}
    anchors: dict[tuple[str, int], tuple[float, float]] = {}
    for bundle in bundles:
        for key, us in bundle.anchors.items():
            if anchors.setdefault(key, us) != us:
                speeds = f"{anchors[key]}, {us}"
                raise ValueError(
                    f"families of {key[0]!r} refer to two speeds of the machine (times of "
                    f"reference tasks in us): {speeds}; train them anew on the same rows"
                )
    machines = {name: machine for bundle in bundles for name, machine in bundle.machines.items()}
    return Bundle(
        models=widen_unseen_offsets(models), gpus=gpus, anchors=anchors, machines=machines
    )


def widen_unseen_offsets(models: Mapping[str, FamilyModel]) -> dict[str, FamilyModel]:
    """Widen the error interval on unseen GPUs of families measured on fewer than MIN_GPUS GPUs.

    Their ``unseen_offsets``, (low, high) in log time, are extended to cover UNSEEN_GPU_OFFSETS and
    those of every family measured on more GPUs. Families without source GPUs keep theirs.
    """
    wide = [UNSEEN_GPU_OFFSETS]
    wide += [m.unseen_offsets for m in models.values() if _source_count(m) >= MIN_GPUS]
    low, high = min(offsets[0] for offsets in wide), max(offsets[1] for offsets in wide)

    def widened(model: FamilyModel) -> FamilyModel:
        if not 0 < _source_count(model) < MIN_GPUS:
            return model
        p10, p90 = model.unseen_offsets
        return replace(model, unseen_offsets=(min(p10, low), max(p90, high)))

    return {name: widened(model) for name, model in models.items()}


def _source_count(model: FamilyModel) -> int:
    """Number of source GPUs, without CPUs."""
    gpus = model.source_gpus.gpus
    return sum(gpus[name].kind != "cpu" for name in model.source_gpus.measured)
