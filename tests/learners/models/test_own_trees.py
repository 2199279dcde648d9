"""Trees: of one GPU's own, from a table in memory, from files, and from pages on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from itercast.learners.bundle import (
    SHIPPED,
    Bundle,
    ShippedTrees,
    load_trees,
    save_trees,
    tree_names,
)
from itercast.learners.models import trees
from itercast.learners.models.quantiles import Piece, Pieces, quantile_matrix
from itercast.learners.models.training_table import Table, group_split
from itercast.learners.models.trees import Trees, default_options, fit

ONE, TWO, FEW = 1, 2, 3  # columns of x


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The log ratio is a step in the size, another step on each GPU."""
    monkeypatch.setattr("itercast.learners.models.trees.OWN_ROWS", 100)
    monkeypatch.setattr("itercast.learners.models.trees.OWN_TABLE", 200)
    monkeypatch.setattr("itercast.learners.models.trees.SHARED_ROUNDS", 5)
    monkeypatch.setattr("itercast.learners.models.trees.SEVERAL_GPUS_ROUNDS", 60)
    rng = np.random.default_rng(0)
    gpu = np.repeat([ONE, TWO, FEW], [200, 200, 40])
    x = np.zeros((len(gpu), 4), dtype=np.float32)
    x[:, 0] = rng.uniform(0, 1, len(gpu))
    x[np.arange(len(gpu)), gpu] = 1
    step = (x[:, 0] > 0.25 * gpu) * gpu
    return Table(
        x=x,
        roofline_us=np.ones(len(gpu)),
        time_us=np.exp(step.astype(float)),
        group=np.arange(len(gpu)),
        origin=(ONE, TWO, FEW),
        gpus=(ONE, TWO, FEW),
    )


def trees_of(table: Table) -> Trees:
    known, held = group_split(table.group, 0.2, seed=0)
    options = default_options(table)
    return fit(table.take(known), table.take(held), options)


def test_a_gpu_of_many_rows_has_trees_of_its_own(table: Table) -> None:
    """40 rows bear none; with all answers close to the steps."""
    trees = trees_of(table)
    assert sorted(trees.own) == [ONE, TWO]
    error = np.abs(trees.log_ratio(table.x) - table.log_ratio)
    assert np.median(error[:400]) < 0.05


def test_own_trees_answer_for_their_gpu_alone(table: Table) -> None:
    """Many rows: its own; few rows: all common rounds, the shared ones first."""
    trees = trees_of(table)
    assert trees.common is not None
    assert trees.common.num_boosted_rounds() > 5
    found = trees.log_ratio(table.x)
    own = trees.own[ONE].inplace_predict(table.x)
    assert found[:200] == pytest.approx(own[:200])
    assert found[400:] == pytest.approx(trees.common.inplace_predict(table.x[400:]))


def test_trees_are_saved_and_loaded(table: Table, tmp_path: Path) -> None:
    """The same answers from files, with common trees and without; no file but the family's."""
    for some in (table, table.take(np.arange(400))):
        trees = trees_of(some)
        save_trees(trees, tmp_path, "gemm")
        names = tree_names("gemm", trees)
        assert names == ["gemm"] * (trees.common is not None) + ["gemm.1", "gemm.2"]
        loaded = load_trees(tmp_path, "gemm", names, some.x.shape[1])
        assert loaded is not None
        assert loaded.log_ratio(some.x) == pytest.approx(trees.log_ratio(some.x))
    assert load_trees(tmp_path, "gemm", [], 4) is None
    for hostile in ("../gemm", "gemm.x", "norm"):
        with pytest.raises(KeyError):
            load_trees(tmp_path, "gemm", [hostile], 4)


def test_trees_that_ship_are_read_when_they_are_used(tmp_path: Path) -> None:
    """A copy elsewhere is checked and read whole; both hold the same trees."""
    trees = Bundle.load(SHIPPED).models["attention"].ensemble.trees
    shutil.copytree(SHIPPED, tmp_path / "copy")
    copy = Bundle.load(tmp_path / "copy").models["attention"].ensemble.trees
    assert trees is not None and copy is not None
    assert isinstance(trees.own, ShippedTrees) and not trees.own.loaded
    assert [*trees.own] == [*copy.own] and len(trees.own) == 5
    assert all(trees.own[c].save_raw() == copy.own[c].save_raw() for c in copy.own)
    assert len(trees.own.loaded) == 5


ROUNDS = trees.Rounds(common=trees.SHARED_ROUNDS + 5, own={2: 60})


def two_gpus() -> Table:
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
    rows, found = two_gpus(), []
    both = np.column_stack([rows.x, rows.log_ratio]).astype(np.float32)
    for n in range(6):
        path = folder / f"{n}.npy"
        mine = slice(200 * (n // 2) + n % 2, 200 * (n // 2 + 1), 2)
        np.save(path, both[mine])
        found.append(Piece(path=path, rows=100, gpu=3 - n % 2, held=n == 5))
    return Pieces(pieces=found, columns=4, origin=(2, 3), memory_bytes=memory_bytes, folder=folder)


@pytest.mark.parametrize("memory_bytes", [1e9, 0.0])
def test_files_and_pages_teach_what_memory_teaches(tmp_path: Path, memory_bytes: float) -> None:
    """The same quantiles, and trees that forecast the same, common ones and a GPU's own."""
    rows, files = two_gpus(), pieces(tmp_path, memory_bytes)
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


def test_held_out_rows_are_left_out_and_origins_are_hidden(tmp_path: Path) -> None:
    """500 of 600 rows are known; columns 2 and 3 are equal for all where they are hidden."""
    known = pieces(tmp_path, 1e9).known
    assert known.count == 500
    assert quantile_matrix(known).num_row() == 500
    hidden = quantile_matrix(known, zeroed=(2, 3)).get_data().toarray()
    assert len(np.unique(hidden[:, 2:])) == 1
