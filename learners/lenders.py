"""A GPU never seen is priced as if it were one that was, by several: the nearer, the more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from learners.blend import Blend
from learners.table import Encoder, Features, among, feature_table, identities
from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

MOST = 3  # each costs a forecast
LEAST = 0.03  # of the nearest one's share
OTHER_ARCHITECTURE = 1.0  # octaves that another one counts for,
OTHER_STACK = 3.0  # and other software
SAME_UNITS = {"bf16": "fp16"}  # of the same speed
Measured = Mapping[str, Mapping[str, Sequence[str]]]  # stacks by GPU and dtype, the usual one first


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whose each row is, its dtype, and the stack it states ('' where none); facts by GPU.

    ``rows`` are the rows themselves, ``launch`` is by GPU in us, as learned.
    """

    gpu: np.ndarray
    dtype: np.ndarray
    stack: np.ndarray
    gpus: Mapping[str, Gpu]
    rows: pd.DataFrame
    family: Family
    launch: Mapping[str, float]

    @classmethod
    def of(
        cls,
        rows: pd.DataFrame,
        table: Features,
        gpus: Mapping[str, Gpu],
        family: Family,
        launch: Mapping[str, float],
    ) -> Asked:
        """Rows in dataset form and their features."""
        nothing = np.full(len(rows), "", dtype=object)
        codes, dtypes = pd.factorize(table.get("dtype", nothing))
        dtype = np.array([SAME_UNITS.get(name, name) for name in dtypes], dtype=object)[codes]
        stack = rows["stack"].fillna("").to_numpy(dtype=object) if "stack" in rows else nothing
        return cls(
            gpu=table["gpu"],
            dtype=dtype,
            stack=stack,
            gpus=gpus,
            rows=rows,
            family=family,
            launch=launch,
        )

    def take(self, index: Any) -> Asked:
        """Some of the rows."""
        return replace(
            self,
            gpu=self.gpu[index],
            dtype=self.dtype[index],
            stack=self.stack[index],
            rows=self.rows.iloc[index],
        )

    def features_on(self, gpu: str, stack: str) -> Features:
        """Of the same ops on another GPU under another stack."""
        rows = self.rows.assign(gpu=gpu, stack=stack)
        table, _ = feature_table(rows, self.family, self.gpus, self.launch)
        return {**table, **identities(rows, self.family, {})}

    def groups(self) -> Iterator[tuple[np.ndarray, tuple[str, str, str]]]:
        """Where the rows of each GPU, dtype and stack are."""
        columns = (self.gpu, self.dtype, self.stack)
        joint = np.zeros(len(self.gpu), dtype=np.int64)
        for column in columns:
            codes, names = pd.factorize(column)
            joint = joint * len(names) + codes
        _, first, group = np.unique(joint, return_index=True, return_inverse=True)
        for code, at in enumerate(first):
            gpu, dtype, stack = (column[at] for column in columns)
            yield np.flatnonzero(group == code), (gpu, dtype, stack)


def what_was_measured(asked: Asked) -> Measured:
    """Of training rows."""
    found: dict[str, dict[str, list[str]]] = {}
    groups = sorted(asked.groups(), key=lambda group: (-len(group[0]), group[1]))
    for _, (gpu, dtype, stack) in groups:
        found.setdefault(gpu, {}).setdefault(dtype, []).append(stack)
    return found


def apart(one: Gpu, other: Gpu, dtype: str) -> float:
    """How far two GPUs are: octaves between their bandwidths and their peaks; architecture."""
    bandwidth = abs(np.log2(one.hbm_bytes_per_s / other.hbm_bytes_per_s))
    peak = abs(np.log2(one.full_rate(dtype) / other.full_rate(dtype)))
    return float(bandwidth + peak + OTHER_ARCHITECTURE * (one.architecture != other.architecture))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """GPUs that were measured; ``measured`` is empty where none lends: of one GPU, of curves."""

    encoder: Encoder
    measured: Measured

    def strange(self, asked: Asked) -> np.ndarray:
        """Rows of GPUs never measured, or not in a dtype in which others were."""
        if not self.measured:
            seen = self.encoder.vocabulary.get("gpu", [])
            return ~among(asked.gpu, seen) & bool(seen)
        dtypes = {dtype for own in self.measured.values() for dtype in own}
        found = np.zeros(len(asked.gpu), dtype=bool)
        for rows, (gpu, dtype, _) in asked.groups():
            own = self.measured.get(gpu)
            found[rows] = own is None or (dtype in dtypes and dtype not in own)
        return found

    def unmeasured(self, asked: Asked) -> np.ndarray:
        """Rows of dtypes that nothing was measured in on their GPU."""
        found = np.zeros(len(asked.gpu), dtype=bool)
        for rows, (gpu, dtype, _) in asked.groups():
            found[rows] = bool(self.measured) and dtype not in self.measured.get(gpu, {})
        return found

    def shares(
        self, gpu: str, dtype: str, stack: str, gpus: Mapping[str, Gpu]
    ) -> dict[tuple[str, str], float]:
        """Of each lender, with the stack it lends: an octave further away is a quarter.

        Who was not measured in the dtype lends only where nobody was: other units, other kernels.
        """
        found = {}
        able = {name: own for name, own in self.measured.items() if dtype in own} or self.measured
        for name, dtypes in able.items():
            stacks = dtypes.get(dtype) or next(iter(dtypes.values()))
            octaves = apart(gpus[gpu], gpus[name], dtype)
            octaves += OTHER_STACK * (stack not in ("", *stacks))
            found[name, stack if stack in stacks else stacks[0]] = 4.0**-octaves
        best = sorted(found, key=lambda lender: -found[lender])[:MOST]
        best = [lender for lender in best if found[lender] >= LEAST * found[best[0]]]
        total = sum(found[lender] for lender in best)
        return {lender: found[lender] / total for lender in best}

    def predict(
        self, blend: Blend, x: np.ndarray, roofline_us: np.ndarray, asked: Asked
    ) -> np.ndarray:
        """Time in us; of strange rows the weighted geometric mean over their lenders."""
        strange = self.strange(asked)
        if not (self.measured and strange.any()):
            return np.asarray(blend.predict(x, roofline_us))
        index, share, parts = [np.flatnonzero(~strange)], [np.ones((~strange).sum())], [x[~strange]]
        where = np.flatnonzero(strange)
        for rows, group in asked.take(where).groups():
            for lender, weight in self.shares(*group, asked.gpus).items():
                index.append(where[rows])
                share.append(np.full(len(rows), weight))
                parts.append(self._lent(x[where[rows]], asked.take(where[rows]), *lender))
        at = np.concatenate(index)
        guess = np.log(blend.predict(np.concatenate(parts), roofline_us[at]))
        return np.asarray(np.exp(np.bincount(at, np.concatenate(share) * guess, minlength=len(x))))

    def _lent(self, x: np.ndarray, asked: Asked, gpu: str, stack: str) -> np.ndarray:
        """The features on the GPU that lends; of ops that go by tiles, as if this one were it."""
        if not asked.family.tiled:
            return self.encoder.encode(asked.features_on(gpu, stack))
        x = x.copy()
        for name, value in (("gpu", gpu), ("stack", stack)):
            seen = np.array(self.encoder.vocabulary.get(name, []), dtype=object)
            if len(seen):
                x[:, list(self.encoder.places([name]))] = seen == value
        return x
