"""Training on more rows of a family than memory holds: trees learn from all of them, in batches.

A sample, drawn evenly, is in memory. What needs rows there learns from it: cross-validation, the
smooth member of the blend, other learners, intervals. Then the rows are read batch by batch into
files of features, of which XGBoost makes its matrices (``itercast.learners.models.quantiles``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.base.close_names import unknown
from itercast.learners.family_model import Beyond, Prepared
from itercast.learners.features.machine_speed import (
    Anchors,
    Speed,
    at_reference_us,
    undisturbed,
)
from itercast.learners.features.schema import check_rows
from itercast.learners.features.table import feature_table, is_number, origins, shape_places
from itercast.learners.models.quantiles import Piece, Pieces
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family
from itercast.microbench.store import read_rows, row_batches, row_count

log = logging.getLogger(__name__)

MIN_ROWS = 20  # of a family that is trained
BYTES_PER_ROW = 5_000  # of memory that training takes. Measured: 4,200 for products, 71 features
SHARE = 0.25  # no assumption: of the memory, for the sample, and for the matrix of all rows
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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB|TiB)", text)
    if not found or float(found[1]) * UNITS[found[2]] < 2**30:
        raise ValueError(f"memory {text!r}: expected 1GiB or more, such as 4GiB")
    return int(float(found[1]) * UNITS[found[2]])


def outgrows(roots: Sequence[Path], name: str, memory: int) -> bool:
    """Whether a family has more rows than training in so many bytes of memory allows."""
    return row_count(roots, name) * BYTES_PER_ROW > memory


def ok_batches(roots: Sequence[Path], family: Family) -> Iterator[pd.DataFrame]:
    """The family's rows with status ok, checked, batch by batch."""
    for rows in row_batches(roots, family.name):
        check_rows(rows, family)
        yield rows[rows["status"] == "ok"].reset_index(drop=True)


def first_of_kinds(rows: pd.DataFrame, limit: int) -> pd.DataFrame:
    """The first rows of each GPU, software, op and dtype: ``limit`` in all, as even as possible."""
    kinds = [c for c in ("gpu", "stack", "op", "dtype") if c in rows]
    turn = rows.groupby(kinds, dropna=False).cumcount()
    kept: pd.DataFrame = rows.loc[turn.sort_values(kind="stable").index[:limit]]
    return kept


def subsample_evenly(rows: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Draw at most ``limit`` rows, as evenly as possible over GPUs, software, ops and dtypes."""
    if len(rows) <= limit:
        return rows
    mixed = rows.iloc[np.random.default_rng(0).permutation(len(rows))]
    return first_of_kinds(mixed, limit).sort_index().reset_index(drop=True)


def sample_evenly(batches: Iterable[pd.DataFrame], memory: int) -> pd.DataFrame:
    """Draw as many rows as their share of memory holds, as evenly as possible over their kinds."""
    limit, rng = int(SHARE * memory / BYTES_PER_ROW), np.random.default_rng(0)
    kept = pd.DataFrame()
    for rows in batches:
        both = pd.concat([kept, rows.assign(_drawn=rng.random(len(rows)))])
        kept = first_of_kinds(both.sort_values("_drawn", ignore_index=True), limit)
    return kept.drop(columns="_drawn").reset_index(drop=True)


def never_measured(rows: pd.DataFrame) -> Iterator[str]:
    """A line for each op that failed at all of its points on a device, with the first reason."""
    ok = rows["status"] == "ok"
    for (gpu, op), points in rows.assign(ok=ok).groupby(["gpu", "op"]):
        if not points["ok"].any():
            reason = points["reason"].iloc[0] if "reason" in points else points["status"].iloc[0]
            yield f"{op} on {gpu} was never measured, all {len(points)} points failed: {reason}"


def usable_rows(
    roots: Sequence[Path], names: Sequence[str] | None, memory: int | None = None
) -> dict[str, pd.DataFrame]:
    """Rows to train on, by family: status ok, at least MIN_ROWS.

    Of a family that outgrows so many bytes of ``memory`` a sample, drawn evenly. Ops that failed
    wherever they were tried are logged. ValueError for an unknown family, and where no family has
    enough.
    """
    if others := sorted(set(names or []) - set(families())):
        raise unknown("family", others[0], families())
    tables = {}
    for name in names or families():
        if memory is not None and outgrows(roots, name, memory):
            rows = sample_evenly(ok_batches(roots, families()[name]), memory)
        elif len(rows := read_rows(roots, name)):
            check_rows(rows, families()[name])
            for line in never_measured(rows):
                log.warning("%s: %s", name, line)
            rows = rows[rows["status"] == "ok"].reset_index(drop=True)
        if len(rows) >= MIN_ROWS:
            tables[name] = rows
    if not tables:
        where = ", ".join(str(r) for r in roots)
        raise ValueError(f"no family has {MIN_ROWS} measured rows under {where}")
    return tables


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in the cache folder until the training ends; those of killed trainings are removed.

    A training holds the lock of its folder for as long as its process lives.
    """
    root = cache_folder("training")
    root.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        with suppress(OSError), (old / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=root) as name, (Path(name) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRows:
    """All rows of a family that is trained on a sample of them, where ``folder`` has room.

    They take 4 bytes of disk per row and feature, and 2 more where pages are kept.
    """

    roots: Sequence[Path]
    family: Family
    anchors: Anchors
    memory: int
    folder: Path

    def encoded(
        self, prepared: Prepared, speed: Speed, share: float, known_places: np.ndarray
    ) -> Beyond:
        """Write the features of all rows, as ``prepared`` encodes those of the sample.

        Shapes whose place, a hash from 0 to 1, is below ``share`` are held out, but for the
        sample's ``known_places``: so the sample's shapes are on the side that they have there.
        """
        protected = np.unique(known_places[known_places < share])
        pieces: list[Piece] = []
        envelope = dict(prepared.envelope)
        for rows in ok_batches(self.roots, self.family):
            rows = undisturbed(rows, self.anchors)
            if not len(rows):
                continue
            x, log_ratio = self._batch(rows, prepared, speed, envelope)
            place = shape_places(rows, self.family)
            held = (place < share) & ~np.isin(place, protected)
            pieces += self._written(len(pieces), x, log_ratio, held, prepared.table.gpus)
        whole = Pieces(
            pieces=pieces,
            columns=prepared.table.x.shape[1],
            origin=prepared.table.origin,
            memory_bytes=SHARE * self.memory,
            folder=self.folder,
        )
        return Beyond(known=whole.known, every=whole, envelope=envelope)

    def _batch(
        self,
        rows: pd.DataFrame,
        prepared: Prepared,
        speed: Speed,
        envelope: dict[str, tuple[float, float]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encoded features and log ratios of a batch; widens the envelope by them."""
        features, roofline = feature_table(rows, self.family, prepared.query.gpus, prepared.launch)
        for name, values in features.items():
            if is_number(values):
                low, high = envelope[name]
                envelope[name] = min(low, float(values.min())), max(high, float(values.max()))
        origin = origins(rows, self.family, prepared.stacks)
        x = prepared.encoder.encode({**features, **origin})
        return x, np.log(at_reference_us(rows, speed)) - np.log(roofline)

    def _written(
        self,
        number: int,
        x: np.ndarray,
        log_ratio: np.ndarray,
        held: np.ndarray,
        gpus: Sequence[int],
    ) -> Iterator[Piece]:
        """Write a batch as one file per GPU and side."""
        both = np.column_stack([x, log_ratio]).astype(np.float32)
        gpu = np.array(gpus)[x[:, list(gpus)].argmax(1)] if gpus else np.full(len(x), -1)
        for column, side in sorted(set(zip(gpu.tolist(), held.tolist(), strict=True))):
            mine = (gpu == column) & (held == side)
            path = self.folder / f"{number}-{column}-{int(side)}.npy"
            np.save(path, both[mine])
            yield Piece(path=path, rows=int(mine.sum()), gpu=column, held=side)
