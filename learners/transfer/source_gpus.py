"""A GPU never seen is priced as if it were one that was, by several: the nearer, the more.

So is an op that other GPUs were measured with and this one was not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from learners.features.op_aliases import as_measured, op_names
from learners.features.table import Encoder, Features, among, feature_table, identities
from learners.models.ensemble import Blend
from microbench.hardware.spec import Gpu
from microbench.ops.family import Family

MOST = 3  # each costs a forecast
LEAST = 0.03  # of the nearest one's share
OTHER_ARCHITECTURE = 1.0  # octaves that another one counts for,
OTHER_STACK = 3.0  # and other software
SAME_UNITS = {"bf16": "fp16"}  # of the same speed
Measured = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
"""Stacks by GPU, dtype and op, the one of most rows first."""

# Major compute capability: kernels are written for one of these and often run on the next.
# Source: https://developer.nvidia.com/cuda-gpus
GENERATION = {"pascal": 6, "volta": 7, "turing": 7, "ampere": 8, "ada": 8, "hopper": 9}
GENERATION |= {"blackwell": 10, "blackwell-ultra": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """What rows have in common: GPU, dtype, op, and software.

    ``stack`` is stated: what else was measured counts as farther away. ``wanted`` is preferred
    where it was measured (learners.transfer.source_gpus.chosen). '' where there is none.
    """

    gpu: str
    dtype: str
    op: str = ""
    stack: str = ""
    wanted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whose each row is, by column (see Whose); facts by GPU.

    ``rows`` are the rows themselves, ``launch`` is by GPU in us, as learned.
    """

    gpu: np.ndarray
    dtype: np.ndarray
    op: np.ndarray
    stack: np.ndarray
    wanted: np.ndarray
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
        stack, wanted = (
            rows[name].fillna("").to_numpy(dtype=object) if name in rows else nothing
            for name in ("stack", "stack_wanted")
        )
        return cls(
            gpu=table["gpu"],
            dtype=dtype,
            op=op_names(rows, family),
            stack=stack,
            wanted=wanted,
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
            op=self.op[index],
            stack=self.stack[index],
            wanted=self.wanted[index],
            rows=self.rows.iloc[index],
        )

    def groups(self) -> Iterator[tuple[np.ndarray, Whose]]:
        """Where the rows of each GPU, dtype, op and software are."""
        columns = (self.gpu, self.dtype, self.op, self.stack, self.wanted)
        joint = np.zeros(len(self.gpu), dtype=np.int64)
        for column in columns:
            codes, names = pd.factorize(column)
            joint = joint * len(names) + codes
        _, first, group = np.unique(joint, return_index=True, return_inverse=True)
        order = np.argsort(group, kind="stable")
        ends = np.cumsum(np.bincount(group, minlength=len(first)))
        for at, where in zip(first, np.split(order, ends), strict=False):  # a last part is empty
            gpu, dtype, op, stack, wanted = (column[at] for column in columns)
            yield where, Whose(gpu=gpu, dtype=dtype, op=op, stack=stack, wanted=wanted)


def what_was_measured(asked: Asked) -> Measured:
    """Of training rows."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    groups = sorted(asked.groups(), key=lambda group: (-len(group[0]), repr(group[1])))
    for _, who in groups:
        by_op = found.setdefault(who.gpu, {}).setdefault(who.dtype, {})
        by_op.setdefault(who.op, []).append(who.stack)
    return found


def apart(one: Gpu, other: Gpu, dtype: str) -> float:
    """How far two GPUs are: octaves between their bandwidths and their peaks; architecture."""
    bandwidth = abs(np.log2(one.hbm_bytes_per_s / other.hbm_bytes_per_s))
    peak = abs(np.log2(one.full_rate(dtype) / other.full_rate(dtype)))
    return float(bandwidth + peak + OTHER_ARCHITECTURE * (one.architecture != other.architecture))


def software(stack: str) -> str:
    """A stack without its version: torch of ``torch-2.11.0+cu130``."""
    return re.split(r"[- ]", stack, maxsplit=1)[0]


def version(stack: str) -> tuple[int, ...]:
    """The numbers of a stack's version; () where it states none."""
    found = re.match(r"[^- ]*-(\d+(?:\.\d+)*)", stack)
    return tuple(map(int, found[1].split("."))) if found else ()


def chosen(stacks: Sequence[str], wanted: str) -> str:
    """The stack that is wanted, else the newest of that software, else '' (none of these)."""
    if wanted in stacks:
        return wanted
    alike = [s for s in stacks if wanted and software(s) == software(wanted)]
    return max(alike, key=version, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """GPUs that were measured, and their hardware.

    ``measured`` is empty where none lends: of one CPU, of curves.
    """

    encoder: Encoder
    measured: Measured
    gpus: Mapping[str, Gpu] = field(default_factory=dict)

    def _others(self, gpu: Gpu) -> Measured:
        """What was measured on devices of its kind: a CPU's times tell nothing of a GPU's."""
        alike = {
            name: own
            for name, own in self.measured.items()
            if name not in self.gpus or self.gpus[name].kind == gpu.kind
        }
        return alike or self.measured

    def strange(self, asked: Asked) -> np.ndarray:
        """Rows of GPUs never measured, or not in a dtype or with an op that others were."""
        if not self.measured:
            seen = self.encoder.vocabulary.get("gpu", [])
            return ~among(asked.gpu, seen) & bool(seen)
        dtypes = {dtype for own in self.measured.values() for dtype in own}
        found = self.unseen(asked)
        for rows, who in asked.groups():
            own = self.measured.get(who.gpu)
            found[rows] |= own is not None and who.dtype in dtypes and who.dtype not in own
        return found

    def unseen(self, asked: Asked) -> np.ndarray:
        """Rows of GPUs never measured, or not with an op that others were measured with.

        In one dtype, in which the GPU itself was measured with other ops.
        """
        found = np.zeros(len(asked.gpu), dtype=bool)
        for rows, who in asked.groups() if self.measured else ():
            own = self.measured.get(who.gpu)
            if own is None:
                found[rows] = True
            elif who.op and who.op not in own.get(who.dtype, {who.op: ()}):
                others = self._others(asked.gpus[who.gpu]).values()
                found[rows] = any(who.op in other.get(who.dtype, {}) for other in others)
        return found

    def unmeasured(self, asked: Asked) -> np.ndarray:
        """Rows of dtypes that nothing was measured in on their GPU."""
        found = np.zeros(len(asked.gpu), dtype=bool)
        for rows, who in asked.groups():
            found[rows] = bool(self.measured) and who.dtype not in self.measured.get(who.gpu, {})
        return found

    def tells(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether rows tell of an op on a GPU: its own, or others' that may stand for it.

        An op measured on two architectures or more shows what all have in common. What one alone
        showed is lent to GPUs of that generation and of those next to it: for others, other ops
        that were measured on them say more.
        """
        dtype = SAME_UNITS.get(dtype, dtype)
        others = self._others(gpu)
        owners = [n for n, own in others.items() if op in own.get(dtype, {})]
        known = {self.gpus[n].architecture for n in owners if n in self.gpus}
        return (
            gpu.name in owners or len(known) > 1 or any(_near(gpu.architecture, a) for a in known)
        )

    def has(self, gpu: Gpu, op: str, dtype: str) -> bool:
        """Whether an op was measured on that very GPU."""
        return op in self.measured.get(gpu.name, {}).get(SAME_UNITS.get(dtype, dtype), {})

    def usual(self, asked: Asked, stacks: Mapping[str, str]) -> np.ndarray:
        """The software that stands for each row's GPU: what is wanted, else what is usual there.

        ``stacks`` is the usual one by GPU, of all its rows.
        """
        found = np.full(len(asked.gpu), "", dtype=object)
        for rows, who in asked.groups():
            own, most = self.measured.get(who.gpu, {}), stacks.get(who.gpu, "")
            ops = own.get(who.dtype, {})
            if who.wanted and who.op in ops:
                most = chosen(ops[who.op], who.wanted) or ops[who.op][0]
            elif who.wanted:
                every = [s for by_op in ([ops] if ops else own.values()) for s in _stacks(by_op)]
                most = chosen(every, who.wanted) or most
            found[rows] = most
        return found

    def _able(self, who: Whose, gpu: Gpu, family: Family) -> dict[str, Sequence[str]]:
        """Stacks of those who were measured with the op or one alike in the dtype.

        Else in the dtype, else at all: other units, other kernels.
        """
        others = self._others(gpu)
        same = [who.op, *(family.alike if who.op in family.alike else ())]
        in_dtype = {n: own[who.dtype] for n, own in others.items() if who.dtype in own}
        with_op = {n: next((ops[o] for o in same if o in ops), None) for n, ops in in_dtype.items()}
        if any(with_op.values()):
            return {n: stacks for n, stacks in with_op.items() if stacks}
        every = in_dtype or {n: next(iter(own.values())) for n, own in others.items()}
        return {n: _stacks(by_op) for n, by_op in every.items()}

    def shares(self, who: Whose, gpu: Gpu, family: Family) -> dict[tuple[str, str], float]:
        """Of each lender, with the stack it lends: an octave further away is a quarter.

        Who was not measured in the dtype, or with the op, lends only where nobody was. ``gpu`` is
        the hardware of ``who``.
        """
        found = {}
        for name, stacks in self._able(who, gpu, family).items():
            octaves = apart(gpu, self.gpus[name], who.dtype)
            octaves += OTHER_STACK * (who.stack not in ("", *stacks))
            lent = who.stack if who.stack in stacks else chosen(stacks, who.wanted) or stacks[0]
            found[name, lent] = 4.0**-octaves
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
        where = np.flatnonzero(strange)
        lent: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        for rows, who in asked.take(where).groups():
            for lender, weight in self.shares(who, asked.gpus[who.gpu], asked.family).items():
                lent.setdefault(lender, []).append((where[rows], np.full(len(rows), weight)))
        index, share, parts = [np.flatnonzero(~strange)], [np.ones((~strange).sum())], [x[~strange]]
        for lender, pieces in lent.items():
            rows, weights = (np.concatenate(piece) for piece in zip(*pieces, strict=True))
            index.append(rows)
            share.append(weights)
            parts.append(self._lent(x[rows], asked.take(rows), *lender))
        at = np.concatenate(index)
        guess = np.log(blend.predict(np.concatenate(parts), roofline_us[at]))
        return np.asarray(np.exp(np.bincount(at, np.concatenate(share) * guess, minlength=len(x))))

    def own_ops(self, rows: pd.DataFrame, family: Family, gpu: str) -> pd.DataFrame:
        """The rows, of ops that this GPU was measured with in their dtype where some are alike."""
        own = self.measured.get(gpu, {})
        if not family.alike or not own:
            return rows
        dtypes = pd.unique(rows["dtype"]) if "dtype" in rows else ()
        ops = {d: list(own.get(SAME_UNITS.get(d, d), ())) for d in dtypes}
        return as_measured(rows, family, {d: o for d, o in ops.items() if o}, missing=False)

    def _lent(self, x: np.ndarray, asked: Asked, gpu: str, stack: str) -> np.ndarray:
        """The features on the GPU that lends; of ops that go by tiles, as if this one were it."""
        family = asked.family
        rows = self.own_ops(asked.rows, family, gpu)
        if not family.tiled:
            rows = rows.assign(gpu=gpu, stack=stack)
            table, _ = feature_table(rows, family, asked.gpus, asked.launch)
            return self.encoder.encode({**table, **identities(rows, family, {})})
        if rows is not asked.rows:
            table, _ = feature_table(rows, family, asked.gpus, asked.launch)
            x = self.encoder.encode({**table, **identities(rows, family, {})})
        x = x.copy()
        for name, value in (("gpu", gpu), ("stack", stack)):
            seen = np.array(self.encoder.vocabulary.get(name, []), dtype=object)
            if len(seen):
                x[:, list(self.encoder.places([name]))] = seen == value
        return x


def _near(one: str, other: str) -> bool:
    """Whether two architectures are of one generation or of two in a row."""
    if one not in GENERATION or other not in GENERATION:
        return one == other
    return abs(GENERATION[one] - GENERATION[other]) <= 1


def _stacks(by_op: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(s for stacks in by_op.values() for s in stacks))
