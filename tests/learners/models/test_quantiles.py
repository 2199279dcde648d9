"""Trees learn the same from a table in memory, from files, and from pages on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xgboost as xgb

from itercast.learners.models import trees
from itercast.learners.models.quantiles import Piece, Pieces, quantile_matrix
from itercast.learners.models.training_table import Table

ROUNDS = trees.Rounds(common=trees.SHARED_ROUNDS + 5, own={2: 60})


def table() -> Table:
    """600 rows of two GPUs (columns 2 and 3), whose log ratio is a sum of features."""
    x = np.random.default_rng(0).uniform(0, 1, (600, 4)).astype(np.float32)
    x[:, 2] = np.arange(600) % 2
    x[:, 3] = 1 - x[:, 2]
    time_us = np.exp(x[:, :3].sum(1)).astype(float)
    return Table(
        x=x,
        roofline_us=np.ones(600),
        time_us=time_us,
        group=np.arange(600),
        origin=(2, 3),
        gpus=(2, 3),
    )


def pieces(folder: Path, memory_bytes: float) -> Pieces:
    """The rows of the table in six files."""
    rows, found = table(), []
    both = np.column_stack([rows.x, rows.log_ratio]).astype(np.float32)
    for n in range(6):
        path = folder / f"{n}.npy"
        mine = slice(200 * (n // 2) + n % 2, 200 * (n // 2 + 1), 2)
        np.save(path, both[mine])
        found.append(Piece(path=path, rows=100, gpu=3 - n % 2, held=n == 5))
    return Pieces(pieces=found, columns=4, origin=(2, 3), memory_bytes=memory_bytes, folder=folder)


def test_bins_are_quantiles_counted_by_hand(tmp_path: Path) -> None:
    """Values 0 to 3 in two files: cuts between them, as if all were in one array."""
    values = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]], dtype=np.float32)
    for n in range(2):
        np.save(tmp_path / f"{n}.npy", values[2 * n : 2 * n + 2])
    found = [Piece(path=tmp_path / f"{n}.npy", rows=2, gpu=-1, held=False) for n in range(2)]
    rows = Pieces(pieces=found, columns=1, origin=(), memory_bytes=1e9, folder=tmp_path)
    cuts = quantile_matrix(rows).get_quantile_cut()[1]
    assert cuts[1:4].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("memory_bytes", [1e9, 0.0])
def test_files_and_pages_teach_what_memory_teaches(tmp_path: Path, memory_bytes: float) -> None:
    """The same quantiles, and trees that forecast the same, common ones and a GPU's own."""
    rows, files = table(), pieces(tmp_path, memory_bytes)
    assert (files.pages is None) == (memory_bytes > 0)
    for one, other in ((rows, files), (rows.of_gpu(3), files.of_gpu(3))):
        cuts = [m.get_quantile_cut() for m in (quantile_matrix(one), quantile_matrix(other))]
        for mine, theirs in zip(*cuts, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    options = {**trees.DEFAULTS, "subsample": 1.0}
    in_memory, from_disk = (trees.refit(r, options, ROUNDS) for r in (rows, files))
    guess = from_disk.log_ratio(rows.x)
    np.testing.assert_allclose(guess, in_memory.log_ratio(rows.x), atol=1e-4)
    assert np.abs(guess - rows.log_ratio)[rows.x[:, 2] > 0].mean() < 0.1
    assert not list(tmp_path.glob("pages*"))  # XGBoost's own files are gone


def test_a_matrix_of_quantiles_equals_that_of_values() -> None:
    """Trees of a plain DMatrix, to which no quantiles were given, are the same to the last bit."""
    rows, options = table(), {"max_depth": 6, "nthread": 1, "subsample": 0.8, "seed": 0}
    plain = xgb.train(options, xgb.DMatrix(rows.x, rows.log_ratio), 20)
    ours = xgb.train(options, quantile_matrix(rows), 20)
    assert plain.save_raw("json") == ours.save_raw("json")


def test_held_out_rows_are_left_out_and_origins_are_hidden(tmp_path: Path) -> None:
    """500 of 600 rows are known; columns 2 and 3 are equal for all where they are hidden."""
    known = pieces(tmp_path, 1e9).known
    assert known.count == 500
    assert quantile_matrix(known).num_row() == 500
    hidden = quantile_matrix(known, zeroed=(2, 3)).get_data().toarray()
    assert len(np.unique(hidden[:, 2:])) == 1
