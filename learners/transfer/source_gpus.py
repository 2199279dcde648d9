"""Forecasts for GPUs without rows: a weighted mean of forecasts for similar measured GPUs.

These are its source GPUs; the nearer in bandwidth, peak and architecture, the larger their weight.
Dtypes and ops that a GPU was not measured with, but others were, are forecast likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.learners.features.op_aliases import as_measured
from itercast.learners.features.table import Encoder, feature_table, isin, origins
from itercast.learners.models.ensemble import Ensemble
from itercast.learners.transfer.query_rows import (
    EQUAL_SPEED_DTYPE,
    SAME_KERNELS_DTYPE,
    Measured,
    QueryRows,
    RowGroup,
)
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY, Gpu
from itercast.microbench.hardware.stack import pick_version, similar_software, software_name
from itercast.microbench.ops.family import Family

MAX_SOURCES = assumed(__file__, "max_sources")
MIN_WEIGHT = assumed(__file__, "min_weight")
WEIGHT_BASE = assumed(__file__, "weight_base")
OTHER_ARCHITECTURE_DISTANCE = assumed(__file__, "other_architecture_distance")
OTHER_STACK_DISTANCE = assumed(__file__, "other_stack_distance")
NEAR_GENERATIONS = assumed(__file__, "near_generations")
OVERLAP = assumed(__file__, "overlap")
REACHED = assumed(__file__, "reached")
Source = tuple[str, str, bool]  # a GPU, its software, whether times move by the roofline alone


def gpu_distance(first: Gpu, second: Gpu, dtype: str) -> float:
    """Distance of two GPUs: |log2 bandwidth ratio| + |log2 peak ratio|.

    OTHER_ARCHITECTURE_DISTANCE is added where the architecture differs.
    """
    bandwidth = abs(np.log2(first.hbm_bytes_per_s / second.hbm_bytes_per_s))
    peak = abs(np.log2(first.full_rate(dtype) / second.full_rate(dtype)))
    penalty = OTHER_ARCHITECTURE_DISTANCE * (first.architecture != second.architecture)
    return float(bandwidth + peak + penalty)


def pick_stack(stacks: Sequence[str], wanted: str) -> str:
    """The wanted stack, else another release of that software, else similar software, else ''.

    Releases: see ``pick_version``; similar: ``Stack.similar``.
    """
    if wanted in stacks or not wanted:
        return wanted if wanted in stacks else ""
    for software in (software_name(wanted), *similar_software(wanted)):
        releases = [s for s in stacks if software_name(s) == software]
        if releases:
            return pick_version(releases, wanted if software == software_name(wanted) else "")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGpus:
    """The measured GPUs of a family, and how they forecast what was not measured.

    ``measured`` is empty where nothing is transferred: models of one CPU, and Gaussian processes
    whose stated kernel describes unseen GPUs itself. ``gpus`` is their hardware.
    """

    encoder: Encoder
    measured: Measured
    gpus: Mapping[str, Gpu] = field(default_factory=dict)

    def _of_same_kind(self, gpu: Gpu) -> Measured:
        """The devices of this one's kind: a CPU's times say nothing about a GPU's."""
        same_kind = {
            name: by_dtype
            for name, by_dtype in self.measured.items()
            if name not in self.gpus or self.gpus[name].kind == gpu.kind
        }
        return same_kind or self.measured

    def _of_vendor(self, gpu: Gpu) -> Measured:
        """The vendor's own measured GPUs if of several architectures, else those of all vendors.

        Each vendor's libraries have kernels of their own.
        """
        same_kind = self._of_same_kind(gpu)
        measured = {name: self.gpus[name] for name in same_kind if name in self.gpus}
        own = {name: other for name, other in measured.items() if other.vendor == gpu.vendor}
        if len({other.architecture for other in own.values()}) > 1:
            return {name: same_kind[name] for name in own}
        return same_kind

    def stand_in_dtype(self, gpu: Gpu, dtype: str) -> str:
        """The dtype whose rows stand in for this one where no GPU has rows of it, else this dtype.

        TF32 runs on the tensor cores of fp16, with the same tiles at half the rate. A GPU that
        states no rate of the dtype has no such cores, and no other dtype stands in.
        """
        stand_in = str(SAME_KERNELS_DTYPE.get(dtype, dtype))
        measured = {d for by_dtype in self._of_same_kind(gpu).values() for d in by_dtype}
        needs_no_stand_in = dtype in measured or stand_in not in measured
        return dtype if needs_no_stand_in or dtype not in gpu.peak_flops_per_s else stand_in

    def with_stand_in_dtypes(self, rows: pd.DataFrame, gpus: Mapping[str, Gpu]) -> pd.DataFrame:
        """Replaces dtypes that no GPU has rows of by those that stand in for them.

        See ``stand_in_dtype``: rows of fp16, for example, forecast TF32.
        """
        if not self.measured or "dtype" not in rows:
            return rows
        dtype = rows["dtype"].to_numpy(dtype=object).copy()
        replaceable = np.flatnonzero(isin(dtype, SAME_KERNELS_DTYPE))
        if not len(replaceable):
            return rows
        keys = pd.MultiIndex.from_arrays(
            [rows["gpu"].to_numpy(dtype=object)[replaceable], dtype[replaceable]]
        )
        codes, distinct = pd.factorize(keys)
        stand_in = [self.stand_in_dtype(gpus[name], own) for name, own in distinct]
        dtype[replaceable] = np.array(stand_in, dtype=object)[codes]
        return rows.assign(dtype=dtype)

    def unseen(self, query: QueryRows) -> np.ndarray:
        """Mask of rows to forecast from other GPUs (source GPUs).

        Their GPU has no training rows; or none of their dtype or op, while other GPUs have. A
        dtype is seen in rows that stand in for it.
        """
        if not self.measured:
            seen = self.encoder.vocabulary.get("gpu", [])
            return ~isin(query.gpu, seen) & bool(seen)
        dtypes = {dtype for by_dtype in self.measured.values() for dtype in by_dtype}
        mask = self.unseen_gpu_or_op(query)
        for rows, group in query.groups:
            by_dtype = self.measured.get(group.gpu)
            if by_dtype is not None:
                mask[rows] |= group.dtype in dtypes and group.dtype not in by_dtype
        return mask

    def unseen_gpu_or_op(self, query: QueryRows) -> np.ndarray:
        """Mask of rows whose GPU has no training rows at all, or none of their op.

        The op counts as unseen if the GPU was measured with other ops in the dtype, and a GPU of
        the same kind with this op.
        """
        mask = np.zeros(len(query.gpu), dtype=bool)
        for rows, group in query.groups if self.measured else ():
            by_dtype = self.measured.get(group.gpu)
            if by_dtype is None:
                mask[rows] = True
            elif group.op and group.op not in by_dtype.get(group.dtype, {group.op: ()}):
                others = self._of_vendor(query.gpus[group.gpu]).values()
                mask[rows] = any(group.op in other.get(group.dtype, {}) for other in others)
        return mask

    def covers(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether measured rows say how fast an op is on a GPU: its own, or its source GPUs'.

        Rows of two architectures or more (``_of_vendor``) cover every GPU. Rows of one cover GPUs
        of that generation and the next to it; elsewhere rows of other ops say more.
        """
        dtype, lenders = EQUAL_SPEED_DTYPE.get(dtype, dtype), self._of_vendor(gpu)
        with_op = [name for name, by_dtype in lenders.items() if op in by_dtype.get(dtype, {})]
        architectures = {self.gpus[name].architecture for name in with_op if name in self.gpus}
        return (
            gpu.name in with_op
            or len(architectures) > 1
            or any(_near(gpu.architecture, other) for other in architectures)
        )

    def has_measured(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether an op was measured in a dtype on that very GPU."""
        dtype = EQUAL_SPEED_DTYPE.get(dtype, dtype)
        return op in self.measured.get(gpu.name, {}).get(dtype, {})

    def stacks_of(self, query: QueryRows, usual: Mapping[str, str]) -> np.ndarray:
        """The software to forecast each row with: that wanted, else the usual one of its GPU.

        ``usual`` is by GPU, of all its rows. Without rows of the wanted software for this op and
        dtype, the op's most measured stack is taken.
        """
        result = np.full(len(query.gpu), "", dtype=object)
        for rows, group in query.groups:
            by_dtype, stack = self.measured.get(group.gpu, {}), usual.get(group.gpu, "")
            by_op = by_dtype.get(group.dtype, {})
            if group.wanted and group.op in by_op:
                stack = pick_stack(by_op[group.op], group.wanted) or by_op[group.op][0]
            elif group.wanted:
                tables = [by_op] if by_op else by_dtype.values()
                stacks = [s for table in tables for s in _stacks(table)]
                stack = pick_stack(stacks, group.wanted) or stack
            result[rows] = stack
        return result

    def _candidates(self, group: RowGroup, gpu: Gpu, family: Family) -> dict[str, Sequence[str]]:
        """Possible source GPUs, and their stacks.

        Those measured with the op or an alias in the dtype; if there are none, those measured in
        the dtype; if there are none, all.
        """
        others = self._of_vendor(gpu)
        aliases = [group.op, *(family.op_aliases if group.op in family.op_aliases else ())]
        in_dtype = {n: dtypes[group.dtype] for n, dtypes in others.items() if group.dtype in dtypes}
        with_op = {
            name: next((by_op[op] for op in aliases if op in by_op), None)
            for name, by_op in in_dtype.items()
        }
        if any(with_op.values()):
            return {name: stacks for name, stacks in with_op.items() if stacks}
        chosen = in_dtype or {name: next(iter(dtypes.values())) for name, dtypes in others.items()}
        return {name: _stacks(by_op) for name, by_op in chosen.items()}

    def weights(self, group: RowGroup, gpu: Gpu, family: Family) -> dict[tuple[str, str], float]:
        """Weights of the source GPUs, by name and software stack; their sum is 1.

        weight = WEIGHT_BASE ** -distance, with ``gpu_distance`` plus OTHER_STACK_DISTANCE where the
        source was not measured under the group's stack. ``gpu`` is the hardware of the group.
        """
        weight = {}
        for name, stacks in self._candidates(group, gpu, family).items():
            distance = gpu_distance(gpu, self.gpus[name], group.dtype)
            distance += OTHER_STACK_DISTANCE * (group.stack not in ("", *stacks))
            stack = group.stack if group.stack in stacks else pick_stack(stacks, group.wanted)
            weight[name, stack or stacks[0]] = WEIGHT_BASE**-distance
        best = sorted(weight, key=lambda source: -weight[source])[:MAX_SOURCES]
        best = [source for source in best if weight[source] >= MIN_WEIGHT * weight[best[0]]]
        total = sum(weight[source] for source in best)
        return {source: weight[source] / total for source in best}

    def predict(
        self, ensemble: Ensemble, x: np.ndarray, roofline_us: np.ndarray, query: QueryRows
    ) -> np.ndarray:
        """Predict times in us; of unseen rows the weighted geometric mean over source GPUs.

        Rows are concatenated for one call of the ensemble: first those that were measured, then
        each unseen row once for each of its sources. See ``_moved_us`` for how a time on a source
        GPU becomes one on another.
        """
        unseen = self.unseen(query)
        if not (self.measured and unseen.any()):
            return np.asarray(ensemble.predict(x, roofline_us))
        unseen_rows = np.flatnonzero(unseen)
        unseen_query = query if unseen.all() else query.take(unseen_rows)
        by_source: dict[Source, list[tuple[np.ndarray, np.ndarray]]] = {}
        for rows, group in unseen_query.groups:
            gpu = query.gpus[group.gpu]
            for (name, stack), weight in self.weights(group, gpu, query.family).items():
                piece = (unseen_rows[rows], np.full(len(rows), weight))
                by_roofline = _is_by_roofline(query.family, self.gpus[name], gpu)
                by_source.setdefault((name, stack, by_roofline), []).append(piece)
        index, weights, inputs = [np.flatnonzero(~unseen)], [np.ones((~unseen).sum())], [x[~unseen]]
        rooflines_us, slowdowns = [roofline_us[~unseen]], [np.ones((~unseen).sum())]
        for source, pieces in by_source.items():
            rows, piece_weights = (np.concatenate(part) for part in zip(*pieces, strict=True))
            index.append(rows)
            weights.append(piece_weights)
            asked = query.take(rows)
            x_there, there_us = self._features_on(x[rows], asked, roofline_us[rows], source)
            inputs.append(x_there)
            rooflines_us.append(there_us)
            slowdowns.append(np.ones(len(rows)) if source[2] else self._slower(asked, source[0]))
        row, source_us = np.concatenate(index), np.concatenate(rooflines_us)
        ratio = ensemble.predict(np.concatenate(inputs), np.ones(len(row)))
        log_us = np.log(_moved_us(ratio, source_us, roofline_us[row], np.concatenate(slowdowns)))
        return np.asarray(np.exp(np.bincount(row, np.concatenate(weights) * log_us, len(x))))

    def _slower(self, query: QueryRows, source: str) -> np.ndarray:
        """By row, the arithmetic rate (``_vector_rate``) of the source GPU over the row's GPU's.

        Convolutions scale by it too: their time beyond the roofline does not shrink with faster
        tensor cores.
        """
        codes, distinct = pd.factorize(query.gpu)
        rate = _vector_rate(self.gpus[source])
        return np.array([rate / _vector_rate(query.gpus[name]) for name in distinct])[codes]

    def with_measured_ops(self, rows: pd.DataFrame, family: Family, gpu: str) -> pd.DataFrame:
        """The rows with ops replaced by aliases that ``gpu`` was measured with in their dtype."""
        by_dtype = self.measured.get(gpu, {})
        if not family.op_aliases or not by_dtype:
            return rows
        dtypes = pd.unique(rows["dtype"]) if "dtype" in rows else ()
        ops = {d: list(by_dtype.get(EQUAL_SPEED_DTYPE.get(d, d), ())) for d in dtypes}
        return as_measured(rows, family, {d: o for d, o in ops.items() if o}, missing=False)

    def _features_on(
        self, x: np.ndarray, query: QueryRows, roofline_us: np.ndarray, source: Source
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows encoded as if run on the source GPU under its software, and their rooflines.

        Families that scale by roofline alone keep the roofline of the rows' own GPU; families of
        tiles keep all features but the names of GPU and software.
        """
        gpu, stack, by_roofline = source
        family, stand_in = query.family, query.stood_in
        rows = query.rows
        if stand_in.any():
            own = rows["dtype"].to_numpy(dtype=object)
            rows = rows.assign(dtype=np.where(stand_in, query.dtype, own))
        rows = self.with_measured_ops(rows, family, gpu)
        if not (by_roofline and family.tiled):
            rows = rows.assign(gpu=gpu, stack=stack)
            table, source_us = feature_table(rows, family, query.gpus, query.launch)
            x = self.encoder.encode({**table, **origins(rows, family, {})})
            return x, roofline_us if by_roofline else source_us
        if rows is not query.rows:
            table, _ = feature_table(rows, family, query.gpus, query.launch)
            x = self.encoder.encode({**table, **origins(rows, family, {})})
        x = x.copy()
        for name, value in (("gpu", gpu), ("stack", stack)):
            seen = np.array(self.encoder.vocabulary.get(name, []), dtype=object)
            if len(seen):
                x[:, list(self.encoder.column_numbers([name]))] = seen == value
        return x, roofline_us


def _moved_us(
    ratio: np.ndarray, source_us: np.ndarray, own_us: np.ndarray, slower: np.ndarray
) -> np.ndarray:
    """Time in us on a GPU of kernels that take ``ratio`` times their roofline on a source GPU.

    Up to 1 / REACHED the roofline is the bound. Beyond it the rest is work of the SMs, ``slower``
    times as long on the GPU, partly hidden behind memory:

        time ** OVERLAP = (roofline / REACHED) ** OVERLAP + rest ** OVERLAP
    """
    bound = 1 / REACHED
    rest_us = source_us * np.maximum(ratio**OVERLAP - bound**OVERLAP, 0) ** (1 / OVERLAP) * slower
    moved_us = ((bound * own_us) ** OVERLAP + rest_us**OVERLAP) ** (1 / OVERLAP)
    return np.asarray(np.where(ratio > bound, moved_us, own_us * ratio))


def _is_by_roofline(family: Family, source: Gpu, gpu: Gpu) -> bool:
    """Whether a family's ops take the same multiple of their roofline on both GPUs.

    Kernels of tiles on tensor cores of another architecture do, whose waste scales with the peak,
    and messages, whose pace no SM sets.
    """
    on_tensor_cores = family.tiled or family.by_roofline
    return family.ranks > 1 or (on_tensor_cores and source.architecture != gpu.architecture)


def _vector_rate(gpu: Gpu) -> float:
    """Peak of arithmetic outside matrix products in flops/s: fp32, at most 64 lanes per SM.

    All lanes count on Pascal. Since Turing integers have lanes of their own; where an SM has 128
    fp32 lanes, as Ampere's GA102 and Hopper do, half of them also serve integers or lie idle in
    other kernels.
    """
    peak = gpu.full_rate("fp32")
    of_64_lanes = 2 * 64 * gpu.sm_count * gpu.clock_hz  # a multiply and an add per clock
    return peak if gpu.architecture == "pascal" else min(peak, of_64_lanes)


def _near(first: str, second: str) -> bool:
    """Whether two architectures are at most NEAR_GENERATIONS apart."""
    if first not in COMPUTE_CAPABILITY or second not in COMPUTE_CAPABILITY:
        return first == second
    apart = abs(COMPUTE_CAPABILITY[first][0] - COMPUTE_CAPABILITY[second][0])
    return bool(apart <= NEAR_GENERATIONS)


def _stacks(by_op: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(s for stacks in by_op.values() for s in stacks))
