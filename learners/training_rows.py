"""The rows that families are trained on: all that are ok, or as many as memory holds."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.close_names import unknown
from itercast.learners.features.schema import check_rows
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family
from itercast.microbench.store import read_parts, read_rows

log = logging.getLogger(__name__)

MIN_ROWS = 20  # of a family that is trained
BYTES_PER_ROW = 5_000  # of memory that training takes. Measured: 4,200 for products, 71 features
DEFAULT_SHARE = 0.5  # of the machine's memory
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container or a job, or "max"


def memory_bytes(text: str | None, trainings: int = 1) -> int:
    """Bytes of a size such as 4GiB; without text half of the machine's, shared by ``trainings``."""
    if text is None:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):
            whole = min(whole, int(CGROUP.read_text()))
        return int(DEFAULT_SHARE * whole / trainings)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB|TiB)", text)
    if not match or float(match[1]) * UNITS[match[2]] < 2**30:
        raise ValueError(f"memory {text!r}: expected 1GiB or more, such as 4GiB")
    return int(float(match[1]) * UNITS[match[2]])


def first_of_kinds(rows: pd.DataFrame, limit: int) -> pd.DataFrame:
    """The first rows of each kind (GPU, software, op, dtype): ``limit`` in all, equal shares.

    Kinds with fewer rows give all of theirs.
    """
    kinds = [c for c in ("gpu", "stack", "op", "dtype") if c in rows]
    number_in_kind = rows.groupby(kinds, dropna=False).cumcount()
    kept: pd.DataFrame = rows.loc[number_in_kind.sort_values(kind="stable").index[:limit]]
    return kept


def subsample_evenly(rows: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Draw at most ``limit`` rows, as evenly as possible over GPUs, software, ops and dtypes."""
    if len(rows) <= limit:
        return rows
    mixed = rows.iloc[np.random.default_rng(0).permutation(len(rows))]
    return first_of_kinds(mixed, limit).sort_index().reset_index(drop=True)


def never_measured(rows: pd.DataFrame) -> Iterator[str]:
    """A line for each op that failed at all of its points on a device, with the first reason."""
    ok = rows["status"] == "ok"
    for (gpu, op), points in rows.assign(ok=ok).groupby(["gpu", "op"]):
        if not points["ok"].any():
            reason = points["reason"].iloc[0] if "reason" in points else points["status"].iloc[0]
            yield f"{op} on {gpu} was never measured, all {len(points)} points failed: {reason}"


def _check(rows: pd.DataFrame, roots: Sequence[Path], family: Family) -> None:
    """ValueError where a row is not allowed, which names the first part that has such a row."""
    try:
        check_rows(rows, family)
    except ValueError:
        for path, part in read_parts(roots, family.name):
            try:
                check_rows(part.reindex(columns=rows.columns), family)
            except ValueError as exc:
                raise ValueError(f"part {str(path)!r}: {exc}") from None
        raise


def with_mean_times(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with means of samples as times, where a mean was kept beside the median.

    Medians of ops do not add up to a step (``itercast.microbench.timing.clock.usual_mean``).
    """
    if "time_us_mean" not in rows:
        return rows
    return rows.assign(time_us=rows["time_us_mean"].fillna(rows["time_us"]))


def usable_rows(
    roots: Sequence[Path], names: Sequence[str] | None, memory: int | None = None
) -> dict[str, pd.DataFrame]:
    """Rows to train on, by family: status ok, at least MIN_ROWS; times ``with_mean_times``.

    Of a family that outgrows so many bytes of ``memory`` as many as fit, drawn evenly. Ops that
    failed wherever they were tried are logged. ValueError for an unknown family, and where no
    family has enough.
    """
    if others := sorted(set(names or []) - set(families())):
        raise unknown("family", others[0], families())
    tables = {}
    for name in names or families():
        if not len(rows := read_rows(roots, name)):
            continue
        _check(rows, roots, families()[name])
        for line in never_measured(rows):
            log.warning("%s: %s", name, line)
        rows = with_mean_times(rows[rows["status"] == "ok"].reset_index(drop=True))
        if memory is not None and len(rows) * BYTES_PER_ROW > memory:
            limit = memory // BYTES_PER_ROW
            log.warning("%s: of %d rows memory holds %d, drawn evenly", name, len(rows), limit)
            rows = subsample_evenly(rows, limit)
        if len(rows) >= MIN_ROWS:
            tables[name] = rows
    if not tables:
        where = ", ".join(str(r) for r in roots)
        raise ValueError(f"no family has {MIN_ROWS} measured rows under {where}")
    return tables
