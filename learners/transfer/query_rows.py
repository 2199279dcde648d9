"""Rows that a family's model is asked about, with what they share: GPU, dtype, op and software."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import pd
from itercast.learners.features.op_aliases import op_names
from itercast.learners.features.table import Features, map_values
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Family

EQUAL_SPEED_DTYPE = assumed(__file__, "equal_speed_dtypes")
SAME_KERNELS_DTYPE = assumed(__file__, "same_kernels_dtypes")
Measured = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
"""Software stacks by GPU, dtype and op, the one with most rows first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """GPU, dtype, op and software that some rows share; '' where one is not given.

    Source GPUs measured under another ``stack`` count as farther away. Their stack of ``wanted``
    software is preferred where they have one (``pick_stack``).
    """

    gpu: str
    dtype: str
    op: str = ""
    stack: str = ""
    wanted: str = ""


@dataclass(frozen=True, kw_only=True)  # without slots: ``groups`` is kept once found
class QueryRows:
    """Rows to forecast, with GPU, dtype, op and software of each (see RowGroup).

    ``dtype`` is the one whose measured rows are asked, which need not be that of ``rows``:
    equally fast ones count as one, and see ``SourceGpus.with_stand_in_dtypes``.
    ``gpus`` is hardware by name, ``launch`` the host launch in us by GPU
    (``features.table.learn_launch_us``).
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
    ) -> QueryRows:
        """The rows to forecast, given in dataset form; ``table`` has their features and origins."""
        unstated = np.full(len(rows), "", dtype=object)
        codes, dtypes = pd.factorize(table.get("dtype", unstated))
        dtype = np.array([EQUAL_SPEED_DTYPE.get(d, d) for d in dtypes], dtype=object)[codes]
        stack, wanted = (
            rows[name].fillna("").to_numpy(dtype=object) if name in rows else unstated
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

    def take(self, index: np.ndarray) -> QueryRows:
        """Return the rows of these indices."""
        return replace(
            self,
            gpu=self.gpu[index],
            dtype=self.dtype[index],
            op=self.op[index],
            stack=self.stack[index],
            wanted=self.wanted[index],
            rows=self.rows.iloc[index],
        )

    @property
    def stood_in(self) -> np.ndarray:
        """Mask of rows forecast by rows of a stand-in dtype, whose peak rate differs."""
        if "dtype" not in self.rows:
            return np.zeros(len(self.rows), dtype=bool)
        own = self.rows["dtype"].to_numpy(dtype=object)
        return np.asarray(self.dtype == map_values(own, SAME_KERNELS_DTYPE, None), dtype=bool)

    @cached_property
    def groups(self) -> list[tuple[np.ndarray, RowGroup]]:
        """Row indices of each distinct GPU, dtype, op and software."""
        columns = {f.name: getattr(self, f.name) for f in fields(RowGroup)}
        joint = np.zeros(len(self.gpu), dtype=np.int64)
        for column in columns.values():
            codes, values = pd.factorize(column)
            joint = joint * len(values) + codes
        code, distinct = pd.factorize(joint, sort=True)
        ends = np.cumsum(np.bincount(code, minlength=len(distinct)))
        pieces = np.split(np.argsort(code, kind="stable"), ends)[: len(distinct)]
        return [
            (index, RowGroup(**{name: column[index[0]] for name, column in columns.items()}))
            for index in pieces
        ]


def measured_in(query: QueryRows) -> Measured:
    """Which GPU, dtype, op and software training rows were measured with."""
    measured: dict[str, dict[str, dict[str, list[str]]]] = {}
    groups = sorted(query.groups, key=lambda pair: (-len(pair[0]), repr(pair[1])))
    for _, group in groups:
        by_op = measured.setdefault(group.gpu, {}).setdefault(group.dtype, {})
        by_op.setdefault(group.op, []).append(group.stack)
    return measured
