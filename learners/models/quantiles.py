"""XGBoost's quantile matrices, made batch by batch: of rows in memory, or of files of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from itercast.capture.base.slow_imports import xgb
from itercast.learners.models.training_table import Batch, Table

MATRIX_BYTES = 2.7  # of memory per row and feature: the bin of a value, twice. Measured: 2.6
ROW_BYTES = 64.0  # per row while trees grow: label, gradient, forecast, node


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file of rows of one GPU (its column of x, or -1), float32: features, then the log ratio.

    ``held``: whether they are of held-out shapes.
    """

    path: Path
    rows: int
    gpu: int
    held: bool

    def load(self) -> Batch:
        """Features and log ratios."""
        both = np.load(self.path)
        return both[:, :-1], both[:, -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Rows in files, for trees to learn from; ``columns`` is the number of their features.

    Matrices larger than ``memory_bytes`` are kept in ``folder``, and read page by page.
    """

    pieces: Sequence[Piece]
    columns: int
    origin: tuple[int, ...]
    memory_bytes: float
    folder: Path
    threads = 0  # all, or OMP_NUM_THREADS

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def known(self) -> Pieces:
        """The rows that were not held out."""
        return replace(self, pieces=[p for p in self.pieces if not p.held])

    def of_gpu(self, column: int) -> Pieces:
        """The rows of a GPU."""
        return replace(self, pieces=[p for p in self.pieces if p.gpu == column])

    def batches(self) -> list[Callable[[], Batch]]:
        """What loads each batch."""
        return [piece.load for piece in self.pieces]

    @property
    def pages(self) -> str | None:
        """Where XGBoost keeps the pages of a matrix that is too large for memory."""
        needed = self.count * (MATRIX_BYTES * self.columns + ROW_BYTES)
        return None if needed <= self.memory_bytes else str(self.folder / "pages")


Rows = Table | Pieces  # that trees learn from


def quantile_matrix(
    rows: Rows, zeroed: Sequence[int] = (), cuts_of: xgb.DMatrix | None = None
) -> xgb.DMatrix:
    """The rows with every feature's value as the bin between two quantiles that holds it.

    ``cuts_of``: a matrix whose quantiles are taken, to score trees while they are fitted to it.
    """
    from itercast.learners.models.batches import Batches  # lazy: it needs xgboost

    kind = xgb.QuantileDMatrix if rows.pages is None else xgb.ExtMemQuantileDMatrix
    return kind(Batches(rows.batches(), zeroed, rows.pages), ref=cuts_of, nthread=rows.threads)
