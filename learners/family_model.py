"""One family's model: trees, what they leave over near measured points, and calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from learners.features.host_calls import HostCall, host_call
from learners.features.machine_speed import Sensitivity, Speed, at_reference_us
from learners.features.op_aliases import as_measured
from learners.features.table import (
    IDENTITY,
    PLACE,
    Encoder,
    Features,
    at_least_us,
    feature_table,
    identities,
    in_envelope,
    is_number,
    learn_launch_us,
    shape_groups,
    usual_stacks,
)
from learners.models import regressors, residuals
from learners.models.ensemble import Blend, CrossFit, cross_fit, fit_quick, refit
from learners.models.kernels import stated_curves
from learners.transfer import achieved_rate
from learners.transfer.calibration import Calibration, points
from learners.transfer.source_gpus import (
    SAME_UNITS,
    Asked,
    Lenders,
    Whose,
    chosen,
    what_was_measured,
)
from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

Offsets = tuple[float, float]
JOIN = 3  # two bounds that are met at once cost a quarter more than either
LEAST_GPUS = 3  # that errors on a GPU left out are learned from


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Time in us, its 10 and 90 % quantiles, and whether every input was seen in training."""

    time_us: np.ndarray
    p10_us: np.ndarray
    p90_us: np.ndarray
    inside: np.ndarray
    roofline_us: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """One family's booster with what is needed to use it.

    ``offsets``: calibrated 10 % and 90 % quantiles of the log error, ``strange_offsets`` those on a
    GPU left out. ``envelope``: smallest and largest value of each number among the training rows.
    ``stacks``: the usual software by GPU. ``launch``: host launch in us by GPU, part of times taken
    from the host. ``lenders``: who prices GPUs never seen. ``sensitivity``: see learners.speed.
    ``host_calls``: what a call costs the host, by GPU and op.
    """

    blend: Blend
    encoder: Encoder
    lenders: Lenders
    offsets: Offsets
    strange_offsets: Offsets
    envelope: Mapping[str, tuple[float, float]]
    sensitivity: Sensitivity
    facts: Mapping[str, Any]
    stacks: Mapping[str, str] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)
    host_calls: Mapping[str, Mapping[str, HostCall]] = field(default_factory=dict)
    residuals: residuals.Residuals | None = None
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def predict(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> Forecasts:
        """Forecasts of rows in dataset form, in their order."""
        asked, table, roofline = self._asked(rows, family, gpus)
        rows, strange = asked.rows, self.lenders.strange(asked)
        guess = self._blended_us(asked, table, roofline) * achieved_rate.correction(
            asked,
            self.lenders,
            lambda large: self._blended_us(*self._asked(large, family, gpus)),
        )
        low, high = (
            np.where(strange, self.strange_offsets[i], self.offsets[i]).astype(float)
            for i in range(2)
        )
        if self.residuals is not None or self.calibrations:
            kind, at = residuals.coordinates(rows, family)
            if self.residuals is not None:
                near = self.residuals.correction(residuals.told_apart(kind, table), at)
                guess = guess * np.exp(near)
            for gpu, calibration in self.calibrations.items():
                mine = rows["gpu"].to_numpy(dtype=object) == gpu
                where = points(at[mine], roofline[mine])
                shift, share = calibration.correction(kind[mine], where)
                guess[mine] *= np.exp(shift)
                low[mine], high[mine] = low[mine] * share, high[mine] * share
        return Forecasts(
            time_us=guess,
            p10_us=guess * np.exp(low),
            p90_us=guess * np.exp(high),
            inside=self._inside(asked, table),
            roofline_us=roofline,
        )

    def _blended_us(self, asked: Asked, table: Features, roofline: np.ndarray) -> np.ndarray:
        """Of trees and networks, not below the time at a halved rate."""
        guess = self.lenders.predict(self.blend, self.encoder.encode(table), roofline, asked)
        bound = at_least_us(asked.rows, asked.family, asked.gpus)
        return np.asarray((guess**JOIN + bound**JOIN) ** (1 / JOIN))

    def inside(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> np.ndarray:
        """Whether every input of a row was seen in training, as ``predict`` says it."""
        asked, table, _ = self._asked(rows, family, gpus)
        return self._inside(asked, table)

    def _inside(self, asked: Asked, table: Features) -> np.ndarray:
        inside = in_envelope(table, self.envelope, self.encoder)
        return np.asarray(inside & ~self.lenders.unseen(asked))

    def as_measured(self, rows: pd.DataFrame, family: Family) -> pd.DataFrame:
        """The rows that stand for these: of ops that were measured in their dtype.

        On their own GPU if it was measured in that dtype, else on any.
        """
        if not family.alike:
            return rows
        ops = self.facts.get("ops", {})
        codes, names = pd.factorize(rows["gpu"].to_numpy(dtype=object))
        places = [np.flatnonzero(codes == code) for code in range(len(names))]
        parts = [rows if len(names) == 1 else rows.iloc[place] for place in places]
        found = [
            as_measured(self.lenders.own_ops(part, family, str(name)), family, ops)
            for part, name in zip(parts, names, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        return pd.concat(found).iloc[np.argsort(np.concatenate(places))]

    def stack_shares(
        self, gpu: Gpu, op: str, dtype: str, wanted: str, family: Family
    ) -> dict[str, float]:
        """Which software's rows answer for an op on a GPU, and how much each counts."""
        lenders, units = self.lenders, SAME_UNITS.get(dtype, dtype)
        if lenders.has(gpu, op, dtype):
            stacks = lenders.measured[gpu.name][units][op]
            return {chosen(stacks, wanted) or stacks[0]: 1.0}
        if not lenders.measured:
            return {}
        found: dict[str, float] = {}
        who = Whose(gpu=gpu.name, dtype=units, op=op, wanted=wanted)
        for (_, stack), share in lenders.shares(who, gpu, family).items():
            found[stack] = found.get(stack, 0.0) + share
        return found

    def answers(self, gpu: Gpu) -> bool:
        """Whether rows of a device of this kind were learned: a CPU's tell nothing of a GPU."""
        kinds = {known.kind for known in self.lenders.gpus.values()}
        return not kinds or gpu.kind in kinds

    def has(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether an op was measured on that very GPU; of one device alone, on that."""
        return self.lenders.has(gpu, op, dtype) if self.lenders.measured else self._seen(op, dtype)

    def tells(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether the measured rows tell of an op (``op_aliases.op_names``) on this GPU."""
        if self.lenders.measured:
            return self.lenders.tells(gpu, op, dtype)
        return self._seen(op, dtype)

    def _seen(self, *words: str) -> bool:
        """Whether all these were learned: names of ops, dtypes."""
        return {w for seen in self.encoder.vocabulary.values() for w in seen}.issuperset(words)

    def host_call(self, gpu: str, op: str) -> HostCall | None:
        """What a call of an op costs the host of a GPU; None where no row of any GPU tells."""
        return host_call(self.host_calls, gpu, op)

    def _asked(
        self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
    ) -> tuple[Asked, Features, np.ndarray]:
        """What stands for the rows, features with whose row it is, and the roofline in us."""
        rows = self.as_measured(rows, family)
        table, roofline = feature_table(rows, family, gpus, self.launch)
        table |= identities(rows, family, self.stacks)
        asked = Asked.of(rows, table, gpus, family, self.launch)
        if (asked.wanted != "").any():
            usual = self.lenders.usual(asked, self.stacks)
            table["stack"] = np.where(asked.stack == "", usual, asked.stack)
        return asked, table, roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Rows as a learner sees them, and what made them so."""

    table: regressors.Table
    features: Features
    encoder: Encoder
    stacks: Mapping[str, str]
    launch: Mapping[str, float]
    asked: Asked
    kind: np.ndarray
    at: np.ndarray

    def lenders(self, known: np.ndarray) -> Lenders:
        """The GPUs that the rows ``known`` are of."""
        gpus = {name: self.asked.gpus[name] for name in pd.unique(self.asked.rows["gpu"])}
        one_cpu = not self.table.identity and {g.kind for g in gpus.values()} == {"cpu"}
        alone = one_cpu or self.table.curves is not None
        measured = {} if alone else what_was_measured(self.asked.take(known))
        return Lenders(encoder=self.encoder, measured=measured, gpus=gpus)


def prepare(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu], speed: Speed | None = None
) -> Prepared:
    """Features, targets and groups of measured rows."""
    rows = rows.reset_index(drop=True)
    launch, stacks = learn_launch_us(rows, family, gpus), usual_stacks(rows)
    features, roofline = feature_table(rows, family, gpus, launch)
    whose = identities(rows, family, stacks)
    told_apart = [c for c in IDENTITY if len(pd.unique(whose[c])) > 1]
    features |= {c: whose[c] for c in told_apart}
    encoder = Encoder.fit(features)
    time_us = rows["time_us"].to_numpy(dtype=float)
    table = regressors.Table(
        x=encoder.encode(features),
        roofline_us=roofline,
        time_us=time_us if speed is None else at_reference_us(rows, speed),
        group=shape_groups(rows, family),
        identity=encoder.places(told_apart) if "gpu" in told_apart else (),
        gpus=encoder.places(["gpu"]) if "gpu" in told_apart else (),
        curves=stated_curves(family, encoder.places),
    )
    kind, at = residuals.coordinates(rows, family)
    return Prepared(
        table=table,
        features=features,
        encoder=encoder,
        stacks=stacks,
        launch=launch,
        asked=Asked.of(
            rows.assign(stack=whose["stack"]), {**features, **whose}, gpus, family, launch
        ),
        kind=residuals.told_apart(kind, {**features, **whose}),
        at=at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Trees and residuals of some of the rows, to be judged on the others."""

    prepared: Prepared
    crossed: CrossFit
    blend: Blend
    residuals: residuals.Residuals | None
    lenders: Lenders

    def blend_us(self, rows: np.ndarray) -> np.ndarray:
        """Forecasts of rows of the prepared table without the residuals, in us."""
        table, asked = self.prepared.table.take(rows), self.prepared.asked.take(rows)
        return self.lenders.predict(self.blend, table.x, table.roofline_us, asked)

    def predict_us(self, rows: np.ndarray) -> np.ndarray:
        """Forecasts of rows of the prepared table in us."""
        guess = self.blend_us(rows)
        if self.residuals is not None:
            kind, at = self.prepared.kind[rows], self.prepared.at[rows]
            guess = guess * np.exp(self.residuals.correction(kind, at))
        return guess


def learn(prepared: Prepared, known: np.ndarray, options: dict[str, Any]) -> Learned:
    """Learn the rows ``known``; a GPU that none of them is of is priced as never seen."""
    train = prepared.table.take(known)
    crossed = cross_fit(train, options)
    return Learned(
        prepared=prepared,
        crossed=crossed,
        blend=refit(train, options, crossed),
        residuals=left_over(prepared, known, crossed),
        lenders=prepared.lenders(known),
    )


def learn_quickly(prepared: Prepared, known: np.ndarray, options: dict[str, Any]) -> FamilyModel:
    """A model of the rows ``known`` that forecasts GPUs none of them is of; no intervals."""
    return FamilyModel(
        blend=fit_quick(prepared.table.take(known), options),
        encoder=prepared.encoder,
        lenders=prepared.lenders(known),
        offsets=(0.0, 0.0),
        strange_offsets=(0.0, 0.0),
        envelope={},
        sensitivity=(1.0, 0.0),
        facts={},
        stacks=prepared.stacks,
        launch=prepared.launch,
    )


def fit_model(
    prepared: Prepared,
    options: dict[str, Any],
    crossed: CrossFit,
    sensitivity: Sensitivity,
    facts: Mapping[str, Any],
) -> FamilyModel:
    """A model of all rows given what cross-validation on them found."""
    features = prepared.features
    numbers = [name for name, values in features.items() if is_number(values)]
    return FamilyModel(
        blend=refit(prepared.table, options, crossed),
        encoder=prepared.encoder,
        lenders=prepared.lenders(np.arange(len(prepared.kind))),
        offsets=crossed.offsets,
        strange_offsets=strange_offsets(prepared, options, crossed.offsets),
        envelope={c: (float(features[c].min()), float(features[c].max())) for c in numbers},
        sensitivity=sensitivity,
        facts=facts,
        stacks=prepared.stacks,
        launch=prepared.launch,
        residuals=left_over(prepared, np.arange(len(prepared.kind)), crossed),
    )


def left_over(
    prepared: Prepared, known: np.ndarray, crossed: CrossFit
) -> residuals.Residuals | None:
    """What is left over near the rows ``known``; a process of all features leaves nothing there."""
    if crossed.path is not None and not prepared.table.identity:
        return None
    kind, at, group = prepared.kind[known], prepared.at[known], prepared.table.group[known]
    return residuals.choose(kind, at, crossed.residual, group)


def strange_offsets(prepared: Prepared, options: dict[str, Any], known: Offsets) -> Offsets:
    """10 and 90 % quantiles of the log error on GPUs left out in thirds.

    Twice ``known`` where fewer than three were measured: see learners.train.widened. CPUs among
    GPUs do not count.
    """
    gpu, hardware = prepared.asked.gpu, prepared.asked.gpus
    kinds = {name: hardware[name.partition(PLACE)[0]].kind for name in sorted(np.unique(gpu))}
    names = [name for name, kind in kinds.items() if kind != "cpu"] or list(kinds)
    if len(names) < LEAST_GPUS:
        return 2 * known[0], 2 * known[1]
    errors = []
    for fold in range(3):
        held = np.isin(gpu, names[fold::3])
        some = np.random.default_rng(fold).permutation(np.flatnonzero(~held))[:20_000]
        out = np.random.default_rng(fold).permutation(np.flatnonzero(held))[:5_000]
        model = learn_quickly(prepared, some, options)
        table, asked = prepared.table.take(out), prepared.asked.take(out)
        guess = model.lenders.predict(model.blend, table.x, table.roofline_us, asked)
        errors.append(np.log(table.time_us / guess))
    low, high = np.quantile(np.concatenate(errors), [0.1, 0.9])
    return min(known[0], float(low)), max(known[1], float(high))
