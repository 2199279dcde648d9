"""Fits and holds one op family's model: ensemble, corrections, calibrations, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from itercast.capture.base.slow_imports import pd
from itercast.capture.base.switches import is_on
from itercast.learners.features.host_calls import HostCall, host_call
from itercast.learners.features.machine_speed import Sensitivity, Speed, at_reference_us
from itercast.learners.features.op_aliases import as_measured
from itercast.learners.features.table import (
    ORIGIN,
    Encoder,
    Features,
    feature_table,
    in_envelope,
    is_number,
    learn_launch_us,
    least_us,
    origins,
    shape_groups,
    usual_stacks,
)
from itercast.learners.models.ensemble import CrossFit, Ensemble, cross_fit, fit_quick, refit
from itercast.learners.models.kernels import stated_kernel
from itercast.learners.models.training_table import Table
from itercast.learners.models.trees import Options
from itercast.learners.transfer.calibration import Calibration, coordinates, kind_keys, points
from itercast.learners.transfer.offsets import Offsets, offsets_of_rows
from itercast.learners.transfer.query_rows import (
    EQUAL_SPEED_DTYPE,
    QueryRows,
    RowGroup,
    measured_in,
)
from itercast.learners.transfer.source_gpus import SourceGpus, pick_stack
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family
from itercast.microbench.store import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Forecasts of rows: times in us, their 10 and 90 % quantiles, and rooflines in us.

    ``inside``: whether all inputs of a row were seen in training.
    """

    time_us: np.ndarray
    p10_us: np.ndarray
    p90_us: np.ndarray
    inside: np.ndarray
    roofline_us: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """The trained model of one op family.

    ``offsets``: see Offsets; ``unseen_offsets`` those on GPUs that were left out of training.
    ``envelope``: smallest and largest value of each numeric feature among the training rows.
    ``stacks``: the usual software by GPU. ``launch``: host launch in us by GPU, contained in times
    taken from the host. ``sensitivity``: see itercast.learners.features.machine_speed. ``facts``:
    digest and number of training rows, errors, ops by dtype. ``host_calls``: host time of a call by
    GPU and op. ``calibrations`` by GPU.
    """

    ensemble: Ensemble
    encoder: Encoder
    source_gpus: SourceGpus
    offsets: Offsets = (0.0, 0.0)
    unseen_offsets: Offsets = (0.0, 0.0)
    envelope: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sensitivity: Sensitivity = (1.0, 0.0)
    facts: Facts = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)
    host_calls: Mapping[str, Mapping[str, HostCall]] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def predict(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> Forecasts:
        """Forecast rows in dataset form, in their order."""
        query, table, roofline_us = self._query(rows, family, gpus)
        x = self.encoder.encode(table)
        time_us = self.source_gpus.predict(self.ensemble, x, roofline_us, query)
        if is_on("peak_rate"):
            time_us = np.maximum(time_us, least_us(query.rows, family, query.gpus))
        unseen = self.source_gpus.unseen(query) | query.stood_in
        inside = self._inside(query, table)
        in_training_range = inside
        if unseen.any():
            in_training_range = np.where(
                unseen, in_envelope(table, self.envelope, self.encoder), inside
            )
        low, high = offsets_of_rows(self.offsets, self.unseen_offsets, unseen, in_training_range)
        if self.calibrations:
            kind, at = coordinates(query.rows, family)
            for gpu, calibration in self.calibrations.items():
                on_gpu = query.rows["gpu"].to_numpy(dtype=object) == gpu
                places = points(at[on_gpu], roofline_us[on_gpu])
                shift, share = calibration.correction(kind[on_gpu], places)
                time_us[on_gpu] *= np.exp(shift)
                low[on_gpu], high[on_gpu] = low[on_gpu] * share, high[on_gpu] * share
        return Forecasts(
            time_us=time_us,
            p10_us=time_us * np.exp(low),
            p90_us=time_us * np.exp(high),
            inside=inside,
            roofline_us=roofline_us,
        )

    def inside(self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]) -> np.ndarray:
        """Mask of rows whose inputs were seen in training, as ``predict`` returns it."""
        query, table, _ = self._query(rows, family, gpus)
        return self._inside(query, table)

    def _inside(self, query: QueryRows, table: Features) -> np.ndarray:
        inside = in_envelope(table, self.envelope, self.encoder)
        return np.asarray(inside & ~self.source_gpus.unseen_gpu_or_op(query) & ~query.stood_in)

    def as_measured(self, rows: pd.DataFrame, family: Family) -> pd.DataFrame:
        """The rows, with ops not measured in their dtype replaced by aliases that were.

        On the row's own GPU if that was measured in the dtype, else on any.
        """
        if not family.op_aliases:
            return rows
        ops = self.facts.get("ops", {})
        codes, names = pd.factorize(rows["gpu"].to_numpy(dtype=object))
        places = [np.flatnonzero(codes == code) for code in range(len(names))]
        parts = [rows if len(names) == 1 else rows.iloc[place] for place in places]
        replaced = [
            as_measured(self.source_gpus.with_measured_ops(part, family, str(name)), family, ops)
            for part, name in zip(parts, names, strict=True)
        ]
        if len(replaced) == 1:
            return replaced[0]
        return pd.concat(replaced).iloc[np.argsort(np.concatenate(places))]

    def row_sources(
        self, gpu: Gpu, op: str, dtype: str, wanted: str, family: Family
    ) -> dict[tuple[str, str], float]:
        """GPUs and software whose rows forecast an op on a GPU, with weights that add up to 1."""
        sources, equal = self.source_gpus, EQUAL_SPEED_DTYPE.get(dtype, dtype)
        if sources.has_measured(gpu, op, dtype):
            stacks = sources.measured[gpu.name][equal][op]
            return {(gpu.name, pick_stack(stacks, wanted) or stacks[0]): 1.0}
        group = RowGroup(gpu=gpu.name, dtype=equal, op=op, wanted=wanted)
        return sources.weights(group, gpu, family) if sources.measured else {}

    def stack_shares(
        self, gpu: Gpu, op: str, dtype: str, wanted: str, family: Family
    ) -> dict[str, float]:
        """Software whose rows forecast an op on a GPU, with weights that add up to 1."""
        shares: dict[str, float] = {}
        for (_, stack), weight in self.row_sources(gpu, op, dtype, wanted, family).items():
            shares[stack] = shares.get(stack, 0.0) + weight
        return shares

    @property
    def half_width(self) -> float:
        """Half width in log time of the 80 % interval of an op, by errors on held-out shapes."""
        p10_offset, p90_offset = self.offsets
        return (p90_offset - p10_offset) / 2

    def covers_kind(self, gpu: Gpu) -> bool:
        """Whether the rows are of devices of this kind: a CPU's times say nothing of a GPU's."""
        kinds = {source.kind for source in self.source_gpus.gpus.values()}
        return not kinds or gpu.kind in kinds

    def has_measured(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether this GPU has rows of this op and dtype; a single-device model ignores ``gpu``."""
        if self.source_gpus.measured:
            return self.source_gpus.has_measured(gpu, op, dtype)
        return self._in_vocabulary(op, dtype)

    def covers(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether measured rows say how fast an op (``op_aliases.op_names``) is on this GPU."""
        if self.source_gpus.measured:
            return self.source_gpus.covers(gpu, op, dtype)
        return self._in_vocabulary(op, dtype)

    def _in_vocabulary(self, *words: str) -> bool:
        """Whether training rows had all of these strings (ops, dtypes)."""
        return {w for seen in self.encoder.vocabulary.values() for w in seen}.issuperset(words)

    def host_call(self, gpu: str, op: str) -> HostCall | None:
        """Host time of a call of an op on a GPU; None where no GPU's rows have it."""
        return host_call(self.host_calls, gpu, op)

    def _query(
        self, rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu]
    ) -> tuple[QueryRows, Features, np.ndarray]:
        """Prepare rows to forecast: the query, their features and origins, their roofline in us.

        Ops are replaced by aliases that were measured (``as_measured``). Features are those of the
        dtype whose measured rows are asked (``SourceGpus.with_stand_in_dtypes``), the roofline is
        that of the rows' own.
        """
        stand_in = self.source_gpus.with_stand_in_dtypes(rows, gpus)
        measured = self.as_measured(stand_in, family)
        table, roofline = feature_table(measured, family, gpus, self.launch)
        if stand_in is not rows:
            rows = measured.assign(dtype=rows["dtype"])
            _, roofline = feature_table(rows, family, gpus, self.launch)
        else:
            rows = measured
        table |= origins(rows, family, self.stacks)
        query = QueryRows.of(rows, table, gpus, family, self.launch)
        if (query.wanted != "").any():
            usual = self.source_gpus.stacks_of(query, self.stacks)
            table["stack"] = np.where(query.stack == "", usual, query.stack)
        return query, table, roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Measured rows as learners need them: training table, features, encoder, launch times.

    ``kind`` and ``at`` are the coordinates that calibrations use.
    """

    table: Table
    features: Features
    encoder: Encoder
    stacks: Mapping[str, str]
    launch: Mapping[str, float]
    query: QueryRows
    kind: np.ndarray
    at: np.ndarray

    @property
    def envelope(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each numeric feature."""
        numbers = {name: v for name, v in self.features.items() if is_number(v)}
        return {name: (float(v.min()), float(v.max())) for name, v in numbers.items()}

    def source_gpus(self, train: np.ndarray) -> SourceGpus:
        """The source GPUs that the rows ``train`` make; none for one CPU or a stated kernel."""
        gpus = {name: self.query.gpus[name] for name in pd.unique(self.query.rows["gpu"])}
        one_cpu = not self.table.origin and {g.kind for g in gpus.values()} == {"cpu"}
        alone = one_cpu or self.table.stated_kernel is not None
        measured = {} if alone else measured_in(self.query.take(train))
        return SourceGpus(encoder=self.encoder, measured=measured, gpus=gpus)

    def model(self, ensemble: Ensemble, train: np.ndarray) -> FamilyModel:
        """The family's model by an ensemble of the rows ``train``."""
        return FamilyModel(
            ensemble=ensemble,
            encoder=self.encoder,
            source_gpus=self.source_gpus(train),
            stacks=self.stacks,
            launch=self.launch,
        )


def prepare(
    rows: pd.DataFrame, family: Family, gpus: Mapping[str, Gpu], speed: Speed | None = None
) -> Prepared:
    """Compute features, targets and shape groups of measured rows.

    With ``speed`` the times are corrected to the machine's reference speed. GPU and software are
    features (``origin``) only where rows differ in them.
    """
    rows = rows.reset_index(drop=True)
    launch, stacks = learn_launch_us(rows, family, gpus), usual_stacks(rows)
    features, roofline = feature_table(rows, family, gpus, launch)
    origin = origins(rows, family, stacks)
    varying = [c for c in ORIGIN if len(pd.unique(origin[c])) > 1]
    features |= {c: origin[c] for c in varying}
    encoder = Encoder.fit(features)
    time_us = rows["time_us"].to_numpy(dtype=float)
    table = Table(
        x=encoder.encode(features),
        roofline_us=roofline,
        time_us=time_us if speed is None else at_reference_us(rows, speed),
        group=shape_groups(rows, family),
        origin=encoder.column_numbers(varying) if "gpu" in varying else (),
        gpus=encoder.column_numbers(["gpu"]) if "gpu" in varying else (),
        stated_kernel=stated_kernel(family, encoder.column_numbers),
    )
    kind, at = coordinates(rows, family)
    return Prepared(
        table=table,
        features=features,
        encoder=encoder,
        stacks=stacks,
        launch=launch,
        query=QueryRows.of(
            rows.assign(stack=origin["stack"]), {**features, **origin}, gpus, family, launch
        ),
        kind=kind_keys(kind, {**features, **origin}),
        at=at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """An ensemble fitted to some of the rows, to be scored on the others."""

    prepared: Prepared
    crossed: CrossFit
    ensemble: Ensemble
    source_gpus: SourceGpus

    def predict_us(self, rows: np.ndarray) -> np.ndarray:
        """Forecast rows of the prepared table in us."""
        table, query = self.prepared.table.take(rows), self.prepared.query.take(rows)
        return self.source_gpus.predict(self.ensemble, table.x, table.roofline_us, query)


def learn(prepared: Prepared, train: np.ndarray, options: Options) -> Learned:
    """Fit to the rows ``train``; GPUs without any of these rows count as unseen."""
    table = prepared.table.take(train)
    crossed = cross_fit(table, options)
    return Learned(
        prepared=prepared,
        crossed=crossed,
        ensemble=refit(table, options, crossed),
        source_gpus=prepared.source_gpus(train),
    )


def learn_quickly(prepared: Prepared, train: np.ndarray, options: Options) -> FamilyModel:
    """Fit to the rows ``train``, to forecast GPUs absent from them; skips the intervals."""
    return prepared.model(fit_quick(prepared.table.take(train), options), train)


def fit_model(
    prepared: Prepared, options: Options, crossed: CrossFit, unseen: Offsets
) -> FamilyModel:
    """Fit a model to all rows, with the rounds and weight of cross-validation.

    ``unseen``: its offsets on GPUs that were left out
    (``itercast.learners.intervals.unseen_offsets``).
    """
    ensemble = refit(prepared.table, options, crossed)
    model = prepared.model(ensemble, np.arange(len(prepared.kind)))
    return replace(
        model, offsets=crossed.offsets, unseen_offsets=unseen, envelope=prepared.envelope
    )
